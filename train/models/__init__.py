"""The models: pure torch, hub parameter names, no distributed code."""
