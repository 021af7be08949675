"""Words that our texts and names do without, each with what to write in its place.

A pattern of WORDS is searched in one sentence, without regard to case. Code spans are not
searched. A pattern of NAMES matches whole parts of an identifier, one of PREFIXES its first parts.
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
ANY_BANNED = re.compile("|".join(pattern.pattern for pattern, _ in BANNED), re.IGNORECASE)
# A statement that begins with a clause in place of its actor: "What waits is preempted."
CLAUSE_FIRST = re.compile(r"(?:What|Who|Whom|Whose)\b(?! (?:happens|to)\b).*[.;]\W*$", re.DOTALL)


def banned_words(sentence: str) -> list[str]:
    """Return what is wrong with the words of a sentence, and what to write in their place."""
    found = [
        f"'{match.group()}': {advice}"
        for pattern, advice in (BANNED if ANY_BANNED.search(sentence) else ())
        if (match := pattern.search(sentence))
    ]
    if CLAUSE_FIRST.match(sentence):
        found.append(f"'{sentence.split()[0]} ...': begin with the actor, as a noun")
    return found


NAMES: tuple[tuple[str, str], ...] = (
    (r"guess(es|ed|ing|ers?)?", "write 'draft' or 'drafter'"),
    (r"tried|tries|(may|ever|end)_try|try_tokens", "write 'draft' or 'verified'"),
    (r"keepers?", "write 'node_agent'"),
    (r"meeting", "write 'rendezvous'"),
    (r"dial(_in)?", "write 'join' or 'connect'"),
    (r"lateness", "write 'stragglers'"),
    (r"alike", "write 'same', 'equal' or 'consistent'"),
    (r"beside", "write 'alongside', 'next_to' or 'other'"),
    (r"behind", "write 'after'"),
    (r"fill_up", "write 'pad'"),
    (r"worth", "write 'value' or 'pays_off'"),
    (r"told|tells?|telling", "write 'set', 'report' or 'notify'"),
    (r"asked|asks?|asking", "write 'requested', 'given' or 'request'"),
    (r"wanted|wants?", "write 'requested', 'expected' or 'needs'"),
    (r"fewest", "write 'min'"),
    (r"whose|whom?|nobody|anew", "write the field's noun"),
    (r"came|went|gone|go(es)?_on", "write 'arrived', 'ended' or 'resumed'"),
    (r"heard|said|says", "write 'received', 'sent' or 'reported'"),
    (r"(give|gives|giving)_way|take_leave", "write 'preempt', 'evict' or 'unload'"),
    (r"leaves?_out|left_out", "write 'omit' or 'skip'"),
)
PREFIXES: tuple[tuple[str, str], ...] = (
    (r"most(?!_(recent|used|common))", "write 'max'"),
    (r"least(?!_recent)", "write 'min'"),
    (r"(what|how)$", "write the field's noun"),
)
BANNED_NAMES = tuple(
    (re.compile(rf"{begin}(?:{pattern})(?:_|$)"), advice)
    for begin, patterns in (("(?:^|_)", NAMES), ("^_*", PREFIXES))
    for pattern, advice in patterns
)
BANNED_TYPES = {"Parts", "Place", "Places", "Way", "Coming", "Here", "Lanes", "CallLanes"}
BANNED_MODULES = {"ahead", "lanes", "late", "places", "reads"}
CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def name_faults(name: str) -> list[str]:
    """Return what is wrong with the parts of an identifier."""
    snake = CAMEL.sub("_", name).lower()
    found = [advice for pattern, advice in BANNED_NAMES if pattern.search(snake)]
    return found + (["name the type with a noun of the field"] if name in BANNED_TYPES else [])


# The verbs that function docstrings begin with.
VERBS = """
abort accept account accumulate acquire activate adapt add adjust admit advance aggregate align
allocate allow analyse announce answer append apply approximate ask assemble assert assign
attach attend attribute authenticate average avoid await back balance begin bind block blend
boot bound branch break bring broadcast buffer build cache calculate call cancel cap capture
carry cast catch centre change charge check choose clamp classify clean clear clone close
collapse collect combine commit compare compile complete compose compress compute concatenate
configure confirm connect construct consume continue convert convolve copy correct count cover
crash create crop cut deal debit decay decide declare decode decompress decrement dedicate
deduplicate defer define delay delegate delete deliver depend dequantise dequantize derive
describe deserialise detach detect determine detokenise diff digest dilate discard disconnect
dispatch distil distribute divide do download draft drain draw drive drop dump duplicate edit
embed emit empty emulate enable encode end enforce enqueue ensure enter enumerate erase escape
establish estimate evaluate evict examine exchange exclude execute exit expand expect expire
explain export expose extend extract fail feed fetch fill filter find finish fire fit fix
flatten flip flush fold follow forbid force forget fork format forward free freeze fuse gather
generate get give grant greet group grow guard hand handle hash have hide hold identify ignore
import include increment index infer inherit initialise initialize inject insert inspect
install instantiate interleave interpolate interpret interrupt invalidate invert issue iterate
join judge keep kill launch lay learn lease leave lend let lift limit link list listen load
locate lock log look lower make map mark mask match materialise mean measure merge migrate mix
mock move multiply mutate name narrow negotiate nest normalise normalize note notify number
observe offer offload omit open optimise order output overwrite pace pack pad page pair park
parse partition pass patch pause peek penalise permute persist pick pin place plan play plot
poll pool pop post precompute predict prefer prefetch prefill prepare present preempt print
process produce profile prompt propose protect prove provide prune publish pull push put
quantise quantize queue quote raise rank rate reach read reassemble rebuild receive recompute
reconnect record recover recycle reduce refer refill refine refresh refuse regenerate register
reject relay release reload rely remember remove rename render reopen reorder repack repair
repeat replace replay reply report represent request require rescale reserve reset reshape
resize resolve respond restart restore restrict result resume retain retire retrieve retry
return reuse reverse revert rewind rewrite roll rotate round route run sample satisfy save
scale scan scatter schedule score scramble search see seed seek select send separate serialise
serialize serve set settle shape shard share shift shorten show shrink shuffle shut sign
simulate skip sleep slice smooth sort spawn split spread squeeze stack stage start state step
stop store stream strip submit subscribe substitute subtract sum summarise summarize supply
suppress survive suspect suspend swap sweep switch sync synchronise take talk terminate test
throw tie tile time tokenise tokenize toggle trace track train transfer transform translate
transpose traverse treat trim truncate try tune turn undo unload unlock unmap unpack unpin
unregister unwrap update upload upscale use validate verify view visit wait wake walk warm warn
watch weigh widen withdraw wrap write yield zero
"""
VERB_SET = frozenset(VERBS.split())
VERB_FIRST = re.compile(r"([A-Z][a-z]+)(?![\w.(\[-])(?! of\b)(?!:)")


def begins_with_verb(docstring: str) -> bool:
    """Return whether a docstring begins with a capitalised imperative verb."""
    match = VERB_FIRST.match(docstring)
    return match is not None and match[1].lower() in VERB_SET
