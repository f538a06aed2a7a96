"""Optimizers, parameter groups, schedules, clipping."""
