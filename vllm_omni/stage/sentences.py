# SPDX-License-Identifier: Apache-2.0
"""Finds the ends of sentences in a text that arrives in pieces, for stages that speak it.

An end is found as soon as what follows shows that it is one, and at the same place whatever the pieces are. Where the
text does not tell (`He met J. Black cats came.`), it is no end: two sentences are better than half of one. A full stop
before a small letter is none, unless the text has had small letters only. Nothing is removed or changed.
"""
# ruff: noqa: RUF001 (punctuation of many languages)

import re

MAX_CHARS = 400
"""Of one sentence; a longer one is cut behind a clause, else at a space, else here."""
MIN_CLAUSE_WORDS = 3
"""Of the clause that may come first."""
MIN_LOWER_WORDS = 3
"""Of a sentence that ends before a small letter."""

_CLOSERS = r"\"'”’»」』）》】)\]}*_~`"
_SENTENCE_MARKS = rf"(?P<stop>[.!?…؟]+)[{_CLOSERS}]*(?P<space>\s+)|(?P<cjk>[。！？｡।]+[{_CLOSERS}]*\s*)"
_LINE_END = r"(?P<line>[^\S\n]*\n\s*)"
_CLAUSE_MARKS = r"(?P<clause>(?:[,;:—–]|(?<=\s)-)[^\S\n]+(?=\S)|[，、；：]\s*)"
_SENTENCE = re.compile(f"{_SENTENCE_MARKS}|{_LINE_END}")
_SENTENCE_OR_CLAUSE = re.compile(f"{_SENTENCE_MARKS}|{_LINE_END}|{_CLAUSE_MARKS}")
_CLAUSE = re.compile(_CLAUSE_MARKS)
_MAY_GROW = re.compile(rf"[.!?…؟。！？｡।\s,;:—–，、；：{_CLOSERS}-]+\Z")
"""The beginning of a mark, or one that may become longer."""

_CJK = "぀-ヿ㐀-鿿가-힯"
_WORDS = re.compile(rf"[{_CJK}]|[^\W_{_CJK}](?:[^\W{_CJK}]|['’-](?=\w))*")
_LAST_WORD = re.compile(r"[^\s(\[{\"“*_/—–-]*\Z")
_DOTTED = re.compile(r"(?:[^\W\d_]{1,2}\.)+[^\W\d_]{1,2}\Z")
_LIST_MARKER = re.compile(r"(?:\A|[\n:])[\s>*#-]*(?:\d{1,3}|[A-Za-z]|[ivx]{1,4})\Z")
_OPENERS = re.compile(r"[^\w\s]*")
_NEXT_WORD = re.compile(r"[^\W\d_]*(?:['’][^\W\d_]+)?")


def _as_set(words: str) -> frozenset[str]:
    return frozenset(words.split())


_NO_END = _as_set(
    "mr mrs ms mx dr prof rev fr gen col maj sgt capt cpt lt cmdr adm sen rep gov pres hon messrs mme mlle "
    "e.g i.e cf vs viz approx ca esp incl resp"
)
"""Abbreviations that end no sentence."""
_BEFORE_NUMBERS = _as_set(
    "no nos nr vol p pp fig figs ch sec eq art pt par jan feb mar apr jun jul aug sep sept oct nov dec"
)
"""Abbreviations before a number; some are words, too."""
_MAY_END = _as_set(
    "etc inc ltd co corp bros llc jr sr st mt ft al dept est ave blvd rd hwy bldg assn univ min max hr hrs secs lb lbs "
    "oz tel ext misc temp avg std tues thurs"
)
"""Abbreviations that may also end a sentence."""
_STARTERS = _as_set(
    "the this that these those there then he she it we they you i i'm i'll i've i'd it's he's she's we're they're "
    "that's there's a an and but so or if when while after before in on at as for from to with my our your his her "
    "their its what who why how where which however also now here let let's please no yes not because although"
)
"""Words that begin a sentence if they are capitalized behind such an abbreviation."""


class SentenceCutter:
    """Cuts one text. White space belongs to the sentence before it, and so do closing quotes and brackets."""

    def __init__(self, *, first_is_clause: bool) -> None:
        """
        Args:
            first_is_clause: The first part may be a clause of a few words, so that speech can begin.
        """
        self._text = ""  # that has not been returned
        self._scanned = 0  # There is no end before this place.
        self._is_lower = True  # What has been returned has no capital letter.
        self._marks = _SENTENCE_OR_CLAUSE if first_is_clause else _SENTENCE

    def add(self, text: str, *, is_last: bool = False) -> list[str]:
        """
        Args:
            is_last: Nothing follows: the rest is returned, too.

        Returns:
            The sentences that this completes, in order; none is empty.
        """
        self._text += text
        sentences = []
        while end := self._find_end():
            sentences.append(self._text[:end])
            self._is_lower = self._is_lower and not _has_capital(sentences[-1])
            self._text, self._scanned, self._marks = self._text[end:], 0, _SENTENCE
        if is_last and self._text:
            sentences.append(self._text)
            self._text = ""
        return sentences

    def _find_end(self) -> int:
        """Where the first sentence ends; 0 if that is not known.

        Only the first `MAX_CHARS` characters, and whether there are more, decide it, and more of them do not change it.
        """
        text = self._text[:MAX_CHARS]
        mark = self._marks.search(text, self._scanned)
        while mark is not None and mark.end() < len(text):
            verdict = _is_end(text, mark, self._is_lower)
            if verdict:
                return mark.end()
            if verdict is None:
                break
            self._scanned = mark.end()
            mark = self._marks.search(text, self._scanned)
        if len(self._text) > MAX_CHARS:
            return _forced_end(text)
        if mark is None:
            tail = _MAY_GROW.search(text, self._scanned)
            self._scanned = len(text) if tail is None else tail.start()
        return 0


def _is_end(text: str, mark: re.Match[str], is_lower: bool) -> bool | None:
    """Whether a mark ends a sentence, or the first clause. None if that depends on what follows the text.

    Args:
        is_lower: There is no capital letter before the text.
    """
    words = _WORDS.findall(text, 0, mark.start())
    if not words:
        return False  # There is nothing to speak.
    if mark["stop"] and "\n" not in mark["space"]:
        return _is_sentence_end(text, mark, is_lower and len(words) >= MIN_LOWER_WORDS)
    if mark.lastgroup == "clause":
        is_number = text[mark.start()] == "," and text[mark.end()].isdigit()  # May 5, 2026
        return len(words) >= MIN_CLAUSE_WORDS and not is_number
    return True


def _is_sentence_end(text: str, mark: re.Match[str], may_be_lower: bool) -> bool | None:
    start = _end_of(_OPENERS, text, mark.end())
    if start == len(text):
        return None
    is_lower = text[start].islower()
    if mark["stop"] != ".":
        has_closers = mark.end("stop") < mark.start("space")
        return not is_lower or not (has_closers or mark["stop"][0] in ".…")
    before = _LAST_WORD.search(text, 0, mark.start())
    last = "" if before is None else before[0].lstrip("'‘")
    name = last.lower()
    is_numbered = name in _BEFORE_NUMBERS and text[start].isdigit()
    if is_numbered or name in _NO_END or _LIST_MARKER.search(text, 0, mark.start()):
        return False
    if is_lower:
        is_short = name in _MAY_END or name in _BEFORE_NUMBERS or _DOTTED.match(name) or len(name) == 1
        return may_be_lower and not is_short and not _has_capital(text[: mark.start()])
    if name not in _MAY_END and not _DOTTED.match(name) and not (len(last) == 1 and last.isupper()):
        return True
    stop = _end_of(_NEXT_WORD, text, start)
    if text[stop:] in ("", "'", "’"):
        return None
    return text[start:stop].lower().replace("’", "'") in _STARTERS


def _has_capital(text: str) -> bool:
    return any(character.isupper() for character in text)


def _end_of(pattern: re.Pattern[str], text: str, start: int) -> int:
    """Where the match of a pattern at `start` ends; `start` if there is none."""
    match = pattern.match(text, start)
    return start if match is None else match.end()


def _forced_end(text: str) -> int:
    clauses = [match.end() for match in _CLAUSE.finditer(text, MAX_CHARS // 4)]
    spaces = [match.end() for match in re.finditer(r"(?<=\S)\s+", text)]
    return (clauses or spaces or [len(text)])[-1]
