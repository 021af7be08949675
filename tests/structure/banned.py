"""Words and phrases that our texts do without, each with what to write in its place.

A pattern is searched in one sentence, without regard to case. Code spans are not searched.
"""

import re

THINGS = (
    "answer|block|bytes|character|chunk|entry|image|limit|message|model|part|piece|prompt|request"
    "|row|second|sequence|step|text|token|word"
)
WORDS: tuple[tuple[str, str], ...] = (
    # Words that have gone out of use.
    (r"anew", "write 'again'"),
    (r"who(so)?ever|whomever", "name the actor"),
    (r"lest|thereof|whereof|wherein|whence|thence|hitherto|henceforth|forthwith|thrice",
     "use a word of today"),
    (r"nought|betwixt|amongst|whilst|aforesaid|therein|herein|thereupon|whereupon",
     "use a word of today"),
    (r"to be had", "write 'available'"),
    (r"in vain", "say what fails"),
    (r"his own|his|him|he", "name the client, the user or the request"),
    # Words that hide who acts.
    (r"nobody|somebody|everybody|anybody", "name the actor: 'no client', 'all users'"),
    (r"who (asks?|asked|comes?|came|waits?|waited|sends?|decodes?|must|gives?|wants?) (?!\w+ing\b)",
     "name the actor: 'clients', 'the waiting requests'"),
    (r"(is|are|was|were|be|been|being|as) told|told", "write 'set', 'given' or 'notified'"),
    (r"tells|tell(?! (me|us|a|short|apart|stories))", "write 'reports', 'returns' or 'shows'"),
    (r"(is|are|was|were|be|been) asked (for|to)|asked for", "write 'requested' or 'set'"),
    # Pronouns in place of nouns.
    (r"of those|those (of|that|which|who|whose)", "repeat the noun: 'the requests that'"),
    (r"the ones? (that|which|who|whose)", "repeat the noun: 'the request that'"),
    (r"of what|of whom|of whose", "use the noun: 'of the blocks'"),
    (r"no (other )?\w+ that|nothing that", "say what is missing, or turn the sentence round"),
    (r"what (guesses|was there|is forced)", "use the noun: 'the draft model', 'the prefix hit'"),
    # Superlatives in place of limits.
    (rf"the (most|fewest) ({THINGS})s?|the most \w+ that|the most of|at the most",
     "write 'the maximum number of', 'at most' or 'up to'"),
    (r"the fewest|fewest", "write 'minimum'"),
    (r"longest ago|used longest", "write 'least recently used'"),
    (r"in the order of coming|in order of coming", "write 'in order of arrival'"),
    # One word for each thing.
    (r"guess(es|ed|ing)?", "write 'draft tokens', 'propose' or 'estimate'"),
    (r"beside(?! the point)", "write 'alongside', 'next to', 'in addition to' or 'besides'"),
    (rf"behind (a|an|the|its|their|each|every|all) ({THINGS})s?", "write 'after'"),
    (r"(go|goes|going|gone|went) on (from|with|to)|(go|goes|going|gone|went) on(?=[,.;:)]|$)",
     "write 'continue', 'resume' or 'fork'"),
    (r"(give|gives|giving|gave|given) way", "write 'preempt' (rows), 'evict' (blocks) or 'unload'"),
    (r"tak(e|es|ing) leave( of)?", "write 'end', 'leave' or 'disconnect'"),
    (r"sa(y|ys|id) nothing|saying nothing", "write 'sends no update' or 'is unset'"),
    (r"alike", "write 'identical', 'equal' or 'both'"),
    (r"worth (its|his|their|the)|worth it", "write 'when it pays off' or 'cheaper'"),
    (r"signs? of life", "write 'heartbeat'"),
    (r"lateness|(come|comes|came) too late", "write 'straggler' or 'misses the deadline'"),
    (r"makes? no sense", "write 'malformed' or 'inconsistent'"),
    (r"takes? no|take (it )?none", "write 'does not accept' or 'is disabled'"),
    (r"leave (\S+ ){1,4}out|left out|leav(e|es|ing) out", "write 'remove', 'omit' or 'skip'"),
    (r"answer's pieces?|pieces? of (an|the) answers?", "write 'chunk' or 'delta'"),
    (r"(?<!there )(is|are|was|were|be) no"
     r" (number|integer|text|list|object|name|JSON|whole number)s?", "write 'is not a number'"),
    (r"(has|have|is|are) gone",
     "say what happened: 'ended', 'disconnected', 'was removed'"),
    (r"as it were|so to speak|by and by|of old|at will", "drop it"),
)  # fmt: skip
SIDE_BY_SIDE = re.compile(r"\bside[ -]by[ -]side\b", re.IGNORECASE)
BANNED = tuple(
    (re.compile(rf"(?<![\w'-])(?:{pattern})(?![\w-])", re.IGNORECASE), advice)
    for pattern, advice in WORDS
)
# A statement that begins with a clause in place of its actor: "What waits is preempted."
CLAUSE_FIRST = re.compile(r"(?:What|Who|Whom|Whose)\b(?! (?:happens|to)\b).*[.;]\W*$", re.DOTALL)


def banned_words(sentence: str) -> list[str]:
    """Return what is wrong with the words of a sentence, and what to write in their place."""
    found = [
        f"'{match.group()}': {advice}"
        for pattern, advice in BANNED
        if (match := pattern.search(sentence))
    ]
    if CLAUSE_FIRST.match(sentence):
        found.append(f"'{sentence.split()[0]} ...': begin with the actor, as a noun")
    return found
