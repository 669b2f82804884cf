"""The first paper's connection: number by number, its start as a plain residual, and what bounds nothing."""

import pytest
import torch

from dsv41_edu.mhc.hyper_connections import HyperConnection


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_connection(n, d, dynamic=True):
    connection = HyperConnection(n, d, dynamic=dynamic).double()
    with torch.no_grad():
        for i, p in enumerate(connection.parameters()):
            p.copy_(drawn(*p.shape, seed=i))
    return connection


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_number_by_number(n, dynamic):
    d, connection, H = 5, random_connection(n, 5, dynamic), drawn(3, n, 5, seed=9)
    new = connection(H, torch.tanh)
    for t in range(3):
        a_m, a_r, b = connection.a_m.detach(), connection.a_r.detach(), connection.b.detach()
        if dynamic:
            normed = (
                H[t] / H[t].square().mean(-1, keepdim=True).add(torch.finfo(H.dtype).eps).sqrt() * connection.norm
            )
            moved = torch.tanh(normed @ connection.w.T)
            a_m = a_m + connection.s_alpha * moved[:, 0]
            a_r = a_r + connection.s_alpha * moved[:, 1 : n + 1]
            b = b + connection.s_beta * moved[:, -1]
        out = torch.tanh(sum(a_m[i] * H[t, i] for i in range(n)))
        for k in range(n):
            expected = sum(a_r[j, k] * H[t, j] for j in range(n)) + b[k] * out
            assert torch.allclose(new[t, k], expected, rtol=1e-10, atol=1e-12)
    assert new.shape == (3, n, d)


@pytest.mark.parametrize("dynamic", [False, True])
def test_it_starts_as_the_plain_residual(dynamic):
    x = drawn(6, 1, 8).float().expand(6, 4, 8)
    for index in range(5):
        new = HyperConnection(4, 8, index, dynamic)(x, torch.tanh)
        assert torch.allclose(new, x + torch.tanh(x), atol=1e-6)


def test_each_reads_another_stream_first():
    H, seen = drawn(2, 4, 8).float(), []
    for index in range(6):
        HyperConnection(4, 8, index)(H, lambda z: seen.append(z) or z)
        assert torch.equal(seen[-1], H[:, index % 4])


def test_its_cost():
    """n (n + 2) static numbers; a norm and n + 2 columns of d dynamic ones, and two scales (appendix B)."""
    n, d = 4, 32
    count = lambda c: sum(p.numel() for p in c.parameters())  # noqa: E731
    assert count(HyperConnection(n, d, dynamic=False)) == n * (n + 2)
    assert count(HyperConnection(n, d)) == n * (n + 2) + d * (n + 3) + 2


def test_gradients_reach_all_parameters():
    connection = random_connection(3, 4)
    connection(drawn(2, 3, 4, seed=5), torch.tanh).square().sum().backward()
    assert all(p.grad.abs().max() > 0 for p in connection.parameters())


def test_streams_keep_their_dtype_and_may_be_none():
    connection = HyperConnection(2, 8)
    assert connection(torch.zeros(3, 2, 8, dtype=torch.bfloat16), lambda z: z).dtype == torch.bfloat16
    assert connection(torch.zeros(0, 2, 8), lambda z: z).shape == (0, 2, 8)


def test_another_number_of_streams():
    with pytest.raises(ValueError, match=r"streams of shape \[3, 4, 8\]: expected \[..., 2, d\]"):
        HyperConnection(2, 8)(torch.zeros(3, 4, 8), lambda z: z)
    for n in (0, 9):
        with pytest.raises(ValueError, match=f"n = {n}: expected 1 to 8 streams"):
            HyperConnection(n, 8)
