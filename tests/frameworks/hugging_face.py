"""A small BERT under Hugging Face's Trainer, made from its configuration.

    hugging_face.py [BACKEND | before]

BACKEND is what the Trainer is told. "before" makes the group itself, on "fanin", which the Trainer
then takes.
"""

from __future__ import annotations

import os
import sys

import results
import torch
import torch.distributed as dist
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

way = sys.argv[1] if len(sys.argv) > 1 else None
if way == "before":
    dist.init_process_group("fanin")
torch.manual_seed(0)
model = BertForSequenceClassification(
    BertConfig(
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
    )
)
generator = torch.Generator().manual_seed(1)
examples = [
    {"input_ids": torch.randint(0, 64, (8,), generator=generator), "labels": number % 2}
    for number in range(32)
]
trainer = Trainer(
    model,
    TrainingArguments(
        output_dir=os.environ["RESULTS"],
        max_steps=4,
        per_device_train_batch_size=2,
        use_cpu=True,
        ddp_backend=None if way == "before" else way,
        report_to=[],
        logging_steps=1,
        save_strategy="steps",
        save_steps=2,
        disable_tqdm=True,
    ),
    train_dataset=examples,
    eval_dataset=examples,
)
trainer.train()
evaluated = trainer.evaluate()
results.write(
    dist.get_rank(),
    backend=dist.get_backend(),
    losses=[entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
    evaluated=evaluated["eval_loss"],
    parameters=results.flat(model),
)
