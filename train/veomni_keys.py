"""Keys of VeOmni's configuration that are not ours, each with what takes its place.

Keys that mean the same have the same name and do not stand here. The strict loader shows these lines beside an unknown
key, and docs/veomni.md shows them as a table. `use` names our key; without one the line says why there is none.
"""

from __future__ import annotations

from typing import NamedTuple


class Instead(NamedTuple):
    """use: our key, None where there is none; why: the difference, one line."""

    use: str | None
    why: str

    def __str__(self) -> str:
        return f"use {self.use} ({self.why})" if self.use else self.why


_LIST = "data.sources"
_ONLY_PLAN = "the plan packs ahead of the training"
_NOT_HERE = "not supported"
_PADDING = "always on: sequences are packed, attention sees their documents apart"


def _packed(key: str) -> Instead:
    """Of media, which are decoded once, ahead of the training."""
    return Instead(None, f"at packing: {key} of omniloom pack")


def _moved(key: str) -> Instead:
    """Of VeOmni's older, flat layout."""
    return Instead(key, "stands there now")


VEOMNI_KEYS: dict[str, Instead] = {
    "model.tokenizer_path": Instead("data.processor_path", "one folder with tokenizer and preprocessor files"),
    "model.safetensor_idx_path": Instead(None, "not needed: an export has the shards of its base checkpoint"),
    "model.encoders": Instead(None, "not needed: towers come with the model's family"),
    "model.foundation": Instead(None, "not needed: the family comes from config.json"),
    "model.encoder_data_balance": Instead(None, "always on: media of a sequence are dealt to its ranks by cost"),
    "model.encoder_data_balance_sorting_algo": Instead(None, "not needed: media are always dealt by cost"),
    "model.attn_implementation": Instead("model.ops_implementation.attn_implementation", "all choices stand together"),
    "model.moe_implementation": Instead("model.ops_implementation.moe_implementation", "all choices stand together"),
    "model.ops_implementation.rms_norm_gated_implementation": Instead(None, "of models that are not among ours"),
    "model.ops_implementation.causal_conv1d_implementation": Instead(None, "of models that are not among ours"),
    "model.ops_implementation.chunk_gated_delta_rule_implementation": Instead(None, "of models that are not ours"),
    "model.ops_implementation.dsa_indexer_implementation": Instead(None, "of models that are not among ours"),
    "model.ops_implementation.dsa_attention_implementation": Instead(None, "of models that are not among ours"),
    "model.ops_implementation.mhc_implementation": Instead(None, "of models that are not among ours"),
    "data.train_path": Instead(_LIST, "a list of {path, name, weight}"),
    "data.eval_path": Instead("train.evaluation.sources", "a list of {path, name}"),
    "data.train_size": Instead("train.max_steps", "the plan knows how many steps an epoch has"),
    "data.train_sample": Instead("train.max_steps", "the plan knows how many steps an epoch has"),
    "data.data_type": Instead("data.sources", "source_name of a source names its preprocessor"),
    "data.datasets_type": Instead(None, "not needed: a packed dataset, JSONL or Parquet is told by its path"),
    "data.multisource_datasets_type": Instead("data.sources", "weight of each source"),
    "data.source_name": Instead("data.sources", "source_name of each text source"),
    "data.dyn_bsz_buffer_size": Instead("data.window_rows", f"rows that are packed together; {_ONLY_PLAN}"),
    "data.text_keys": Instead("data.sources", "a preprocessor (source_name) reads the row"),
    "data.chat_template": Instead(None, "not needed: Qwen's layout, by construction, with labels"),
    "data.num_workers": _moved("data.dataloader.num_workers"),
    "data.prefetch_factor": _moved("data.dataloader.prefetch_factor"),
    "data.pin_memory": _moved("data.dataloader.pin_memory"),
    "data.drop_last": Instead(None, "not needed: the plan makes whole steps"),
    "data.mm_configs.fps": _packed("pack.video.fps"),
    "data.mm_configs.min_frames": _packed("pack.video.min_frames"),
    "data.mm_configs.max_frames": _packed("pack.video.max_frames"),
    "data.mm_configs.video_min_pixels": _packed("pack.video.min_pixels"),
    "data.mm_configs.video_max_pixels": _packed("pack.video.max_pixels"),
    "data.mm_configs.video_total_pixels": _packed("pack.video.total_pixels"),
    "data.mm_configs.image_min_pixels": _packed("pack.image.min_pixels"),
    "data.mm_configs.image_max_pixels": _packed("pack.image.max_pixels"),
    "data.mm_configs.scale_factor": _packed("pack.video.factor, 32 for Qwen3 (28 is Qwen2.5's)"),
    "data.mm_configs.frame_factor": Instead(None, "not needed: the model's temporal patch"),
    "data.mm_configs.max_ratio": Instead(None, "not needed: the limit of the model's processor"),
    "data.mm_configs.sample_rate": _packed("pack.audio.sample_rate"),
    "data.silent_exception": Instead("data.dead_samples", "fail, or mask to go on without the sample"),
    "data.dataloader.type": Instead(None, "not needed: there is one loader"),
    "data.dataloader.worker_num_threads": Instead(None, "not needed: workers have one thread each"),
    "data.dataloader.persistent_workers": Instead(None, "not needed: workers live as long as the training"),
    "data.dataloader.in_order": Instead(None, "not needed: batches are always in order"),
    "data.dataloader.drop_last": Instead(None, "not needed: the plan makes whole steps"),
    "data.dataloader.use_background_prefetcher": Instead("data.dataloader.device_prefetch", "always on; how far ahead"),
    "train.dyn_bsz": Instead(None, "always on: sequences are packed up to data.max_seq_len"),
    "train.dyn_bsz_runtime": Instead(None, f"not needed: {_ONLY_PLAN}"),
    "train.dyn_bsz_count_mode": Instead(None, f"not needed: {_ONLY_PLAN}"),
    "train.dyn_bsz_physical_overflow_ratio": Instead(None, "not needed: a sequence never exceeds data.max_seq_len"),
    "train.pad_to_length": Instead("train.pad_multiple", "sequences are padded to a multiple of so many tokens"),
    "train.bsz_warmup_ratio": Instead(None, f"{_NOT_HERE}: every step has train.global_batch_size sequences"),
    "train.bsz_warmup_init_mbtoken": Instead(None, f"{_NOT_HERE}: every step has train.global_batch_size sequences"),
    "train.chunk_mbs_config": Instead("train.gradient_checkpointing.enable", "saves memory in another way"),
    "train.broadcast_model_weights_from_rank0": Instead(None, "not needed: each rank reads its own slices"),
    "train.ep_sharded_stream_load": Instead(None, "always on: each rank reads its own slices"),
    "train.enable_full_determinism": Instead("train.deterministic", "another name"),
    "train.enable_batch_invariant_mode": Instead("train.deterministic", "the nearest: equal results at every run"),
    "train.sync_each_train_step": Instead("train.logging.log_steps", "there the trainer is at most one step ahead"),
    "train.empty_cache_steps": Instead(None, "not needed: memory is not fragmented by our own buffers"),
    "train.gc_steps": Instead(None, "not needed: collections leave out what was there before the first step"),
    "train.data_parallel_mode": _moved("train.accelerator.fsdp_config.fsdp_mode"),
    "train.enable_full_shard": _moved("train.accelerator.dp_replicate_size"),
    "train.enable_fsdp_offload": _moved("train.accelerator.fsdp_config.offload"),
    "train.enable_mixed_precision": _moved("train.accelerator.fsdp_config.mixed_precision.enable"),
    "train.enable_forward_prefetch": _moved("train.accelerator.fsdp_config.forward_prefetch"),
    "train.enable_activation_offload": _moved("train.accelerator.offload_config.enable_activation"),
    "train.activation_gpu_limit": _moved("train.accelerator.offload_config.activation_gpu_limit"),
    "train.enable_gradient_checkpointing": _moved("train.gradient_checkpointing.enable"),
    "train.enable_reentrant": Instead(None, "never: it breaks hooks and unused inputs"),
    "train.rmpad": Instead(None, _PADDING),
    "train.rmpad_with_pos_ids": Instead(None, _PADDING),
    "train.ulysses_parallel_size": _moved("train.accelerator.ulysses_size"),
    "train.expert_parallel_size": _moved("train.accelerator.ep_size"),
    "train.output_dir": _moved("train.checkpoint.output_dir"),
    "train.save_steps": _moved("train.checkpoint.save_steps"),
    "train.save_epochs": _moved("train.checkpoint.save_epochs"),
    "train.save_async": _moved("train.checkpoint.save_async"),
    "train.save_hf_weights": _moved("train.checkpoint.save_hf_weights"),
    "train.load_checkpoint_path": _moved("train.checkpoint.load_path"),
    "train.ckpt_manager": Instead(None, "not needed: torch's distributed checkpoint is the one"),
    "train.lr": _moved("train.optimizer.lr"),
    "train.lr_min": _moved("train.optimizer.lr_min"),
    "train.lr_decay_style": _moved("train.optimizer.lr_decay_style"),
    "train.lr_warmup_ratio": _moved("train.optimizer.lr_warmup_ratio"),
    "train.weight_decay": _moved("train.optimizer.weight_decay"),
    "train.max_grad_norm": _moved("train.optimizer.max_grad_norm"),
    "train.use_wandb": _moved("train.logging.wandb.enable"),
    "train.wandb_project": _moved("train.logging.wandb.project"),
    "train.wandb_name": _moved("train.logging.wandb.name"),
    "train.enable_profiling": _moved("train.profile.enable"),
    "train.eval_steps": Instead("train.evaluation.steps", "another name"),
    "train.eval_epochs": Instead("train.evaluation.steps", "counted in steps"),
    "train.channel_loss": Instead(None, "always on: the loss of each source is logged"),
    "train.wandb": Instead("train.logging.wandb", "another name"),
    "train.optimizer.muon_expert_zero_comm": Instead(None, "not needed: whole experts are never communicated"),
    "train.optimizer.muon_gram_ns_reset_iterations": Instead(None, "not needed: it starts anew after the second step"),
    "train.optimizer.muon_ns_implementation": Instead(
        "train.optimizer.muon_ns_dtype",
        "fp16 takes the Gram form where that is faster, others the standard one",
    ),
    "train.accelerator.tp_size": Instead("train.accelerator.ulysses_size", "tensor parallelism is not supported"),
    "train.accelerator.pp_size": Instead(None, f"{_NOT_HERE}: FSDP shards the layers"),
    "train.accelerator.cp_size": Instead("train.accelerator.ulysses_size", "context parallelism is Ulysses'"),
    "train.accelerator.ep_outside": Instead(None, "not needed: experts always lie inside the data-parallel ranks"),
    "train.accelerator.enable_async": Instead(
        None, "not needed: communication overlaps where that was measured to pay"
    ),
    "train.accelerator.extra_parallel_sizes": Instead("train.accelerator.ep_size", "expert parallelism is the one"),
    "train.accelerator.extra_parallel_names": Instead("train.accelerator.ep_size", "expert parallelism is the one"),
    "train.accelerator.fsdp_config.max_load_broadcast_size": Instead(None, "not needed: each rank reads its slices"),
    "train.accelerator.fsdp_config.mixed_precision.output_dtype": Instead(None, "not needed: losses are float32"),
    "train.accelerator.fsdp_config.mixed_precision.cast_forward_inputs": Instead(None, "not needed: models cast"),
    "train.gradient_checkpointing.debug": Instead(None, f"{_NOT_HERE}: torch's own debug switch does it"),
    "train.gradient_checkpointing.enable_reentrant": Instead(None, "never: it breaks hooks and unused inputs"),
    "train.gradient_checkpointing.early_stop": Instead(None, "always on"),
    "train.torch_compile": Instead("model.ops_implementation", "`compile` is a choice of each operation"),
    "train.checkpoint.manager": Instead(None, "not needed: torch's distributed checkpoint is the one"),
    "train.checkpoint.dcp_save_to_lowest_rank": Instead(None, "not needed: replicas share the work of saving"),
    "train.checkpoint.hf_save_epochs": Instead("train.checkpoint.hf_save_steps", "counted in steps"),
    "train.profile.with_modules": Instead("train.profile.with_stack", "shows the modules, too"),
    "train.profile.rank0_only": Instead(None, "always: rank 0 is profiled"),
}
