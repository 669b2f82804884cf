"""Drawing helpers of the book: every figure is drawn by a function that returns its data with its picture."""
