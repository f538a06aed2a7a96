"""What happens around steps, apart from training."""
