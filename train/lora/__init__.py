"""Low-rank adapters (Hu et al. 2021, arXiv:2106.09685) of linear layers and fused experts."""
