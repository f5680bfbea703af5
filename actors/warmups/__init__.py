"""The ReplaySSM warmups: plain functions over the runner protocol."""
