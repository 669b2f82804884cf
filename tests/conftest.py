"""One thread for torch in each worker: the workers share the cores, and more threads only wait for one another."""

import torch

torch.set_num_threads(1)
