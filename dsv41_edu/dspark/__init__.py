"""Block drafting: heads, verification that loses nothing, and the scheduler that prices each draft."""
