"""The benchmark of training steps with saves behind them."""
