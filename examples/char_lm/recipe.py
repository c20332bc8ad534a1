"""A small GPT on text, byte by byte. The text is Python's own standard library, which every machine has.

Set RAVNEST_TEXT to a folder to train on the text files below it instead. Every client trains on other files; every
tenth or so is held out, by its name, for all of them. The loss is in nats a character (a byte of UTF-8).
"""

import hashlib
import os
import sysconfig
import zlib
from pathlib import Path

import torch
from platformdirs import user_cache_path
from safetensors.torch import load_model, save_model
from torch import nn
from torch.nn import functional

import ravnest_fed as rf

CONTEXT = 64
WIDTH = 128
HEADS = 4
LAYERS = 2
EVALUATION_WINDOWS = 256
MAX_FILE = 2**20
SKIPPED = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3"}


def text_files() -> list[tuple[str, bytes]]:
    """Every text file of the corpus: its relative POSIX name, and its UTF-8 bytes with LF line ends, by name."""
    chosen = os.environ.get("RAVNEST_TEXT")
    root = Path(chosen) if chosen else Path(sysconfig.get_path("stdlib"))
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".") and (chosen or name not in SKIPPED)]
        for file in (Path(folder) / name for name in names if not name.startswith(".")):
            if (chosen or file.suffix == ".py") and file.is_file() and 0 < file.stat().st_size <= MAX_FILE:
                content = file.read_bytes()
                if b"\0" not in content and _is_utf8(content):
                    found.append((file.relative_to(root).as_posix(), content.replace(b"\r\n", b"\n")))
    if not found:
        raise FileNotFoundError(f"no text files in {root}; set RAVNEST_TEXT to a folder of text")
    return sorted(found)


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def is_held_out(name: str) -> bool:
    """Whether the file of this name serves evaluation, on every machine."""
    return zlib.crc32(name.encode()) % 10 == 0


def windows(contents: list[bytes]) -> torch.Tensor:
    """The joined `contents` as rows of CONTEXT + 1 bytes, uint8, that overlap by one byte."""
    text = torch.frombuffer(bytearray(b"\n\n".join(contents)), dtype=torch.uint8)
    if len(text) <= CONTEXT:
        return torch.empty((0, CONTEXT + 1), dtype=torch.uint8)
    return text.unfold(0, CONTEXT + 1, CONTEXT)


class Block(nn.Module):
    """A transformer layer, normalised first: attention to what came before, then a feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.attention_out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        projected = self.query_key_value(self.attention_norm(x))
        query, key, value = projected.view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.feed_forward(x)


class Gpt(nn.Module):
    """Scores (batch, length, 256) of the next byte for bytes (batch, length); the output layer is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.positions = nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.embedding(text) + self.positions[: text.shape[1]]
        scores: torch.Tensor = self.head(self.norm(self.blocks(x)))
        return scores


class CharLm(rf.Recipe):
    """A GPT of 0.44 million parameters."""

    warm_steps = 800
    micro_batch = 16
    local_steps = 20
    max_grad_norm = 1.0

    def __init__(self) -> None:
        self.held_out: torch.Tensor | None = None

    def model(self) -> nn.Module:
        return Gpt()

    def warm_start(self, model: nn.Module) -> None:
        """A short training on all the text, about a minute on one core, kept in the user's cache folder.

        The file's name is a hash of this recipe, the text and the number of steps, so any change trains anew.
        """
        data = self.train_data(rf.Partition(0, 1, 0))
        key = hashlib.sha256(
            Path(__file__).read_bytes() + b"%d" % self.warm_steps + data.contiguous().numpy().tobytes()
        )
        kept = user_cache_path("ravnest-fed") / f"char_lm-{key.hexdigest()[:32]}.safetensors"
        if not kept.exists():
            print(f"training the warm start once, {self.warm_steps} steps, to be kept in {kept}", flush=True)
            self._train_warm(model, data)
            kept.parent.mkdir(parents=True, exist_ok=True)
            part = kept.with_name(f"{kept.name}.{os.getpid()}.part")
            save_model(model, str(part))
            part.replace(kept)
        load_model(model, str(kept))

    def _train_warm(self, model: nn.Module, data: torch.Tensor) -> None:
        random = torch.Generator().manual_seed(0)
        optimizer = self.optimizer(list(model.parameters()))
        model.train()
        for step in range(self.warm_steps):
            for group in optimizer.param_groups:
                group["lr"] = 3e-3 * min(1.0, (step + 1) / 50) * (1 - 0.9 * step / self.warm_steps)
            batch = data[torch.randint(len(data), (32,), generator=random)]
            optimizer.zero_grad()
            loss = self.loss(model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if (step + 1) % 100 == 0:
                print(f"step {step + 1} of {self.warm_steps}: {loss.item():.3f} nats a character", flush=True)

    def train_data(self, part: rf.Partition) -> torch.Tensor:
        contents = [content for name, content in text_files() if not is_held_out(name)]
        return windows([contents[index] for index in part.slice(len(contents))])

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        text = batch.long()
        return functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())

    def optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.95))

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        batch = self.evaluation_windows()
        if not len(batch):
            return {}
        return {"loss": float(self.loss(model, batch.to(next(model.parameters()).device)))}

    def evaluation_examples(self) -> int:
        return max(1, len(self.evaluation_windows()) * CONTEXT)

    def evaluation_windows(self) -> torch.Tensor:
        """Windows spread evenly over the held-out files."""
        if self.held_out is None:
            every = windows([content for name, content in text_files() if is_held_out(name)])
            count = min(EVALUATION_WINDOWS, len(every))
            self.held_out = every[torch.arange(count) * len(every) // max(1, count)]
        return self.held_out
