"""The ReplaySSM warmups: plain functions over a runner protocol, the same on vLLM and on the layout engine."""
