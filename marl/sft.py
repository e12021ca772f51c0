"""Supervision of text heads by `trl.SFTTrainer`, with the loss of joint training's own path.

A module of its own: importing trl takes seconds, and a pipeline that only answers needs none of it.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from datasets import Dataset
from transformers import PrinterCallback
from transformers import logging as hf_logging
from trl import SFTConfig, SFTTrainer

from jointrag.graph.pipeline import Pipeline
from jointrag.marl.warm_start import Act, WarmSettings, likelihood_loss


class HeadTrainer(SFTTrainer):
    """SFTTrainer whose loss takes the path of joint training: cached context, head on the suffix, masks."""

    acts: Sequence[Act]
    pipeline: Pipeline
    head: str

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the mean over labels of the summed token cross-entropy."""
        rows = inputs["row"].tolist()
        loss = likelihood_loss(self.pipeline, [self.acts[i] for i in rows], self.head)
        return (loss, {}) if return_outputs else loss


def train_text_head(pipeline: Pipeline, head: str, acts: Sequence[Act], steps: int, s: WarmSettings) -> None:
    """Supervise a head on text and selection labels with SFTTrainer."""
    named = pipeline.llm.heads.named(head)
    params = [p for name, p in named.items() if not name.startswith("extra.")]  # text uses none of the matrices
    data = Dataset.from_dict({"row": list(range(len(acts))), "input_ids": [list(r.suffix) for r, _ in acts]})
    optimizer = torch.optim.AdamW(params, lr=s.lr, weight_decay=0.0)
    warmup = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min(1.0, (i + 1) / warmup) * max(0.0, 1.0 - i / max(1, steps))
    )
    hf_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # third parties' deprecations; our own code raises
        config = SFTConfig(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=s.batch, report_to=[], disable_tqdm=True,
            save_strategy="no", logging_strategy="no", gradient_checkpointing=False, bf16=False, fp16=False,
            use_cpu=pipeline.llm.device.type == "cpu", remove_unused_columns=False, seed=s.seed, data_seed=s.seed,
            dataset_kwargs={"skip_prepare_dataset": True}, max_grad_norm=1.0, dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = HeadTrainer(
            model=pipeline.llm.heads.peft, args=config, train_dataset=data, optimizers=(optimizer, schedule),
            processing_class=pipeline.llm.tokenizer,
            data_collator=lambda items: {"row": torch.tensor([i["row"] for i in items])},
        )  # fmt: skip
        trainer.acts, trainer.pipeline, trainer.head = acts, pipeline, head
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    pipeline.llm.heads.peft.eval()
