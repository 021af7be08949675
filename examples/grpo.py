"""Reinforcement learning of a rule on two cores: GRPO with the demo model (arXiv 2402.03300).

    python examples/grpo.py --steps 20

The model learns to tell stories of exactly five sentences. The rule that checks a story is the only
teacher. The engine samples several stories per prompt, and the trainer makes stories with an
advantage over their group more likely. The trainer's forward pass is the engine's. So before the
first update of a batch, their log-probabilities are equal to the bit, and the KL is exactly 0.
"""

import argparse
import random
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from quire import LLM, RequestOutput, SamplingParams
from quire.training import Samples, TrainingModel

HEROES = ("cat", "dog", "bird", "fish", "frog", "mouse", "horse", "fox", "bear", "rabbit")
PROMPT = "Tell me a short story about a {hero}."
NUM_SENTENCES = 5
MAX_TOKENS = 160
CLIP = 0.2
Conversation = list[dict[str, str]]


@dataclass(frozen=True)
class Batch:
    """A batch of stories: rewards, and the KL between trainer and engine."""

    reward: float  # mean
    best_share: float  # share of the stories with the highest reward, 1
    kl_before: float  # before the first update
    kl_after: float  # before the last update; 0 if it is the first
    num_tokens: int  # of all responses


def reward(story: str, hero: str, is_finished: bool) -> float:
    """Return 1 for a whole story of five sentences about its hero, and less the further away."""
    sentences = len(re.findall(r"[.!?]", story))
    if not is_finished or hero not in story:
        return 0.0
    return max(0.0, 1.0 - abs(sentences - NUM_SENTENCES) / NUM_SENTENCES)


def rewards_of(outputs: list[RequestOutput], heroes: list[str]) -> torch.Tensor:
    """Return the reward of each story, [prompts, stories per prompt]."""
    return torch.tensor(
        [
            [reward(story.text, hero, story.finish_reason == "stop") for story in output.outputs]
            for output, hero in zip(outputs, heroes, strict=True)
        ]
    )


def advantages_of(rewards_PG: torch.Tensor) -> torch.Tensor:
    """Return how much better each story is than its group, in standard deviations, [P, G]."""
    centred_PG = rewards_PG - rewards_PG.mean(dim=1, keepdim=True)
    return centred_PG / (rewards_PG.std(dim=1, keepdim=True) + 1e-4)


def k3(new_R: torch.Tensor, old_R: torch.Tensor) -> torch.Tensor:
    """Return an estimate of KL(old | new) that is never negative: e^d - 1 - d of d = new - old."""
    difference_R = new_R - old_R
    return (difference_R.exp() - 1 - difference_R).mean()


def loss_of(new_R: torch.Tensor, samples: Samples, advantages_S: torch.Tensor) -> torch.Tensor:
    """Return the clipped loss; each token of a sample has the sample's advantage."""
    advantages_R = advantages_S.repeat_interleave(torch.tensor(samples.lengths))
    ratio_R = (new_R - samples.logprobs).exp()
    clipped_R = ratio_R.clamp(1 - CLIP, 1 + CLIP)
    return -torch.minimum(ratio_R * advantages_R, clipped_R * advantages_R).mean()


def batches(numbers: random.Random, size: int) -> Iterator[tuple[list[str], list[Conversation]]]:
    """Yield heroes, and the conversations that ask for stories about them."""
    while True:
        heroes = numbers.sample(HEROES, k=size)
        yield heroes, [[{"role": "user", "content": PROMPT.format(hero=h)}] for h in heroes]


def train(arguments: argparse.Namespace) -> Iterator[Batch]:
    """Train the model; yield each batch after its updates."""
    torch.manual_seed(arguments.seed)
    model = TrainingModel(arguments.model, dtype=arguments.dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, weight_decay=0.0)
    prompts = batches(random.Random(arguments.seed), arguments.prompts)
    with LLM(arguments.model, dtype=arguments.dtype, disable_log_stats=True) as llm:
        for step in range(arguments.steps):
            heroes, conversations = next(prompts)
            params = SamplingParams(
                n=arguments.group, temperature=1.0, max_tokens=MAX_TOKENS, logprobs=0,
                seed=arguments.seed * 1_000_000 + step,
            )  # fmt: skip
            outputs = llm.chat(conversations, params, use_tqdm=False)
            samples, rewards_PG = Samples.of(outputs), rewards_of(outputs, heroes)
            advantages_S = advantages_of(rewards_PG).flatten()
            divergences = []
            for _ in range(arguments.updates):
                new_R = model(samples.prompts, samples.responses)
                divergences.append(float(k3(new_R.detach(), samples.logprobs)))
                optimizer.zero_grad()
                loss_of(new_R, samples, advantages_S).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            llm.update_weights(model.state_dict(), f"step-{step + 1}")
            if divergences[0] != 0:
                raise SystemExit("trainer and engine differ; this must not happen.")
            yield Batch(
                float(rewards_PG.mean()), float((rewards_PG == 1).float().mean()),
                *(divergences[0], divergences[-1]), len(samples.logprobs),
            )  # fmt: skip


def parse(given: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="GRPO with the demo model.")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="bfloat16", help="of the engine's weights")
    parser.add_argument("--steps", type=int, default=20, help="number of batches")
    parser.add_argument("--prompts", type=int, default=6, help="prompts per batch")
    parser.add_argument("--group", type=int, default=8, help="stories per prompt")
    parser.add_argument("--updates", type=int, default=2, help="updates per batch")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--seed", type=int, default=1)
    found = parser.parse_args(given)
    if not 1 <= found.prompts <= len(HEROES) or found.group < 2 or found.updates < 1:
        parser.error(f"--prompts is from 1 to {len(HEROES)}, --group at least 2, --updates 1.")
    return found


def main() -> None:
    """Train, and print a line for each batch."""
    for number, batch in enumerate(train(parse()), start=1):
        print(
            f"batch {number:3d}  CPU {time.process_time():4.0f} s  KL before {batch.kl_before}"
            f"  after {batch.kl_after:.1e}  tokens {batch.num_tokens:5d}"
            f"  reward {batch.reward:.2f} {'#' * round(40 * batch.reward)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
