"""Fine-tuning with Hugging Face's Trainer, which learns to tell packages by pieces of their source.

    pip install transformers accelerate
    fanin run --nproc-per-node 2 examples/finetune.py
    torchrun --nproc-per-node 2 examples/finetune.py --backend gloo

The only line that knows of fanin is the one that says `init_process_group`: the Trainer takes a
group that exists. Nothing is loaded from the network. A small DistilBERT first learns to fill
gaps in Python's standard library, and is saved as a checkpoint. Fine-tuning loads it, freezes all
but its last layer, and trains that layer with a new head. `--checkpoint FOLDER` starts from a
checkpoint with a tokenizer that you have, of DistilBERT.
"""

from __future__ import annotations

import argparse
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    DataCollatorWithPadding,
    DistilBertConfig,
    DistilBertForMaskedLM,
    DistilBertForSequenceClassification,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)
from transformers.utils import logging

PACKAGES = ("asyncio", "email", "multiprocessing", "unittest")
LINES = 8  # of a piece
TOKENS = 64  # of a piece at most; the rest is cut off
SEED = 20210412


def pieces() -> list[tuple[str, int]]:
    """Return pieces of source, each with the number of its package, alike on every rank."""
    library = Path(sysconfig.get_path("stdlib"))
    found = []
    for number, package in enumerate(PACKAGES):
        for path in sorted((library / package).rglob("*.py")):
            lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
            for start in range(0, len(lines), LINES):
                found.append(("\n".join(lines[start : start + LINES]), number))
    return found


def new_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Learn a vocabulary of byte pairs from the texts."""
    names = {"unk_token": "[UNK]", "pad_token": "[PAD]", "mask_token": "[MASK]"}
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=2000, special_tokens=list(names.values()))
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=TOKENS, padding_side="right", **names
    )


def arguments_of(folder: str, steps: int, rate: float) -> TrainingArguments:
    """Return what both trainings have in common."""
    return TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        learning_rate=rate,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=32,
        lr_scheduler_type="linear",
        logging_steps=50,
        save_strategy="no",
        report_to=[],
        log_level="error",
        log_level_replica="error",
        seed=SEED,
        use_cpu=True,
        # The ranks' average of means. By default a loss that is a mean is multiplied by the ranks.
        average_tokens_across_devices=False,
        ddp_find_unused_parameters=False,
        disable_tqdm=True,
    )


def pretrain(texts: list[str], folder: str, steps: int) -> None:
    """Leave a model that fills gaps, and its tokenizer, in the folder."""
    if dist.get_rank() == 0:
        new_tokenizer(texts).save_pretrained(folder)
    dist.barrier()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = DistilBertConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=TOKENS,
        n_layers=2,
        n_heads=4,
        dim=128,
        hidden_dim=256,
        pad_token_id=tokenizer.pad_token_id,
    )
    data = [tokenizer(text, truncation=True) for text in texts]
    trainer = Trainer(
        DistilBertForMaskedLM(config),
        arguments_of(folder, steps, rate=2e-3),
        train_dataset=data,
        data_collator=DataCollatorForLanguageModeling(tokenizer),
    )
    trainer.train()
    trainer.save_model(folder)  # by rank 0 alone
    dist.barrier()


def finetune(
    train: list[tuple[str, int]], test: list[tuple[str, int]], folder: str, out: str, steps: int
) -> None:
    """Load what the folder has, train its last layer and a head, and count on the held back."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = DistilBertForSequenceClassification.from_pretrained(folder, num_labels=len(PACKAGES))
    frozen = [model.distilbert.embeddings, *model.distilbert.transformer.layer[:-1]]
    for module in frozen:
        module.requires_grad_(False)

    def encoded(pairs: list[tuple[str, int]]) -> list[dict[str, Any]]:
        return [{**tokenizer(text, truncation=True), "labels": label} for text, label in pairs]

    def accuracy(predicted: Any) -> dict[str, float]:
        return {"accuracy": (predicted.predictions.argmax(-1) == predicted.label_ids).mean()}

    trainer = Trainer(
        model,
        arguments_of(out, steps, rate=1e-3),
        train_dataset=encoded(train),
        eval_dataset=encoded(test),
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=accuracy,
    )
    trainer.train()
    results = trainer.evaluate()
    trainer.save_model(out)
    if dist.get_rank() == 0:
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        print(
            f"accuracy {results['eval_accuracy']:.3f} and loss {results['eval_loss']:.4f} "
            f"on {len(test)} pieces, {trained:,} of {model.num_parameters():,} parameters trained",
            flush=True,
        )


def main() -> None:
    """Make a checkpoint, or take the user's, and fine-tune it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="fanin", help="any backend of torch.distributed")
    parser.add_argument("--checkpoint", metavar="FOLDER", help="start from a DistilBERT of yours")
    parser.add_argument("--out", metavar="FOLDER", help="keep both models there")
    parser.add_argument("--pretrain-steps", type=int, default=300)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    if args.checkpoint and not Path(args.checkpoint, "config.json").is_file():
        parser.error(f"--checkpoint: {args.checkpoint} has no config.json; is it a checkpoint?")

    logging.disable_progress_bar()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    dist.init_process_group(args.backend)
    data = pieces()
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(SEED)).tolist()
    held_back = len(data) // 5
    train = [data[number] for number in order[held_back:]]
    test = [data[number] for number in order[:held_back]]

    # All ranks use one folder: on several machines, --out is one that they share.
    with tempfile.TemporaryDirectory() as scratch:
        shared = [args.out or scratch]
        dist.broadcast_object_list(shared)
        folder = args.checkpoint or f"{shared[0]}/pretrained"
        if not args.checkpoint:
            pretrain([text for text, _ in train], folder, args.pretrain_steps)
        finetune(train, test, folder, f"{shared[0]}/finetuned", args.steps)
        # No rank tears its connections down while another still works, or reads the folder.
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
