"""Merge the metrics of several cores into one text in Prometheus' format."""

from collections.abc import Mapping


def merged(texts: Mapping[int, str]) -> str:
    """Merge texts given by core number. Each metric family has its HELP and TYPE lines once, then
    all cores' samples. Samples without labels describe a process and get the core's number as the
    label `engine`."""
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for core, text in texts.items():
        family = ""
        for line in text.splitlines():
            if not line.startswith("#"):
                samples[family].append(_labelled(line, core))
                continue
            family = line.split(" ", 3)[2]
            head = heads.setdefault(family, [])
            samples.setdefault(family, [])
            if line not in head:
                head.append(line)
    lines = [line for family, head in heads.items() for line in (*head, *samples[family])]
    return "".join(f"{line}\n" for line in lines)


def _labelled(sample: str, core: int) -> str:
    name, _, value = sample.partition(" ")
    return sample if "{" in name else f'{name}{{engine="{core}"}} {value}'
