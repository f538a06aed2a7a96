"""The names of all metrics, with units: one table for metrics.jsonl, TensorBoard, Weights & Biases and the plots.

Every value is of the interval since the line before and over all ranks, unless its text says otherwise. A name that
ends in `/` is followed by what it is of.
"""

from __future__ import annotations

METRICS: dict[str, tuple[str, str]] = {
    "step": ("steps", "optimizer steps since the beginning of the training"),
    "epoch": ("epochs", "passes over the data that are complete"),
    "time": ("UTC", "when the line was written"),
    "loss": ("nats per token", "mean over all labelled tokens; of `grpo` the objective, without unit"),
    "loss/": ("nats per token", "the same, of the samples of one source"),
    "aux_loss": ("1", "load-balancing loss of the routers, mean over steps, before its coefficient"),
    "grad_norm": ("1", "2-norm of the gradient over all parameters before clipping, of the last step"),
    "grad_norm_max": ("1", "the largest of the interval"),
    "lr/": ("1", "learning rate of a parameter group in the last step"),
    "tokens": ("tokens", "trained on, without padding"),
    "label_tokens": ("tokens", "with a label"),
    "tokens/": ("tokens", "of one modality"),
    "samples": ("samples", "trained on"),
    "padding": ("1", "share of the tokens of all batches that is padding"),
    "dead_samples": ("samples", "that could not be read and were trained on without labels, since this start"),
    "tokens_total": ("tokens", "since the beginning of the training"),
    "samples_total": ("samples", "since the beginning of the training"),
    "tokens_per_second_per_gpu": ("tokens/s", "`tokens` / (`interval_s` x ranks)"),
    "samples_per_second": ("samples/s", "`samples` / `interval_s`"),
    "tflops_per_gpu": ("10^12/s", "operations of the model, towers counted, without recomputation"),
    "mfu": ("1", "share of the GPU's peak that these are; absent for devices whose peak is not known"),
    "interval_s": ("s", "wall time of the steps, with waiting for data, without saving and evaluation"),
    "step_s": ("s", "`interval_s` / steps"),
    "data_wait_s": ("s", "waiting for data per step, of the rank that waited longest"),
    "data_wait": ("1", "`data_wait_s` / `step_s`"),
    "pause_s": ("s", "saving, evaluating and logging between the steps, not part of `interval_s`"),
    "memory_gb": ("10^9 bytes", "most that was allocated on the device, of the fullest rank; on a CPU its peak RSS"),
    "memory_reserved_gb": ("10^9 bytes", "most that was reserved on the device, of the fullest rank"),
    "memory_retries": ("1", "allocations that had to free cached memory first, all ranks, since this start"),
    "expert_load_max": ("1", "tokens of the fullest expert of a layer / mean over its experts; of the worst layer"),
    "expert_load_mean": ("1", "the same, mean over layers"),
    "experts_idle": ("1", "share of experts that got no token"),
    "moe/max/": ("1", "tokens of the fullest expert / mean, of one layer, over the monitor's interval"),
    "moe/min/": ("1", "tokens of the emptiest expert / mean, of one layer, over the monitor's interval"),
    "source/tokens/": ("tokens", "labelled, of one source, since this start"),
    "source/loss/": ("nats per token", "of one source, mean since this start; as `loss` of `grpo` without unit"),
    "grpo/reward": ("1", "mean over the responses that were trained on"),
    "grpo/reward_std": ("1", "standard deviation of these"),
    "grpo/no_advantage": ("1", "share of responses whose advantage is 0, such as those of rows with equal rewards"),
    "grpo/ratio": ("1", "probability of a response token / the one it was drawn with, mean over tokens"),
    "grpo/clip_low": ("1", "share of response tokens whose gradient stopped as they had become too improbable"),
    "grpo/clip_high": ("1", "the same, too probable"),
    "grpo/far": ("1", "share of response tokens more than e^20 away from what was recorded, which teach nothing"),
    "grpo/kl_old": ("nats per token", "divergence from the policy that drew the tokens, estimated as r - 1 - log r"),
    "grpo/kl_ref": ("nats per token", "divergence from the reference (k3), with `kl_coef` alone"),
    "grpo/nll": ("nats per token", "-log probability of the response tokens, mean"),
    "eval/loss": ("nats per token", "cross-entropy of the held-out data, mean over all labelled tokens"),
    "eval/loss/": ("nats per token", "the same, of one source, where `train.evaluation.sources` has several"),
}


def describe(name: str) -> tuple[str, str]:
    """(unit, meaning) of a metric. KeyError for one that stands in no table."""
    if name in METRICS:
        return METRICS[name]
    parts = name.split("/")
    for end in range(len(parts) - 1, 0, -1):
        prefix = "/".join(parts[:end]) + "/"
        if prefix in METRICS:
            return METRICS[prefix]
    raise KeyError(name)
