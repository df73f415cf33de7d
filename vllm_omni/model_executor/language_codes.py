# SPDX-License-Identifier: Apache-2.0
"""Codes of languages: those of OpenAI's API, and those of models that have others."""

_CODES = """
af:afr am:amh ar:arb as:asm az:azj be:bel bg:bul bn:ben bs:bos ca:cat cs:ces cy:cym da:dan de:deu el:ell en:eng es:spa
et:est eu:eus fa:pes fi:fin fr:fra ga:gle gl:glg gu:guj ha:hau he:heb hi:hin hr:hrv hu:hun hy:hye id:ind is:isl it:ita
ja:jpn jw:jav ka:kat kk:kaz km:khm kn:kan ko:kor lo:lao lt:lit lv:lvs mk:mkd ml:mal mn:khk mr:mar ms:zsm mt:mlt my:mya
ne:npi nl:nld no:nob nn:nno pa:pan pl:pol ps:pbt pt:por ro:ron ru:rus sd:snd sk:slk sl:slv sn:sna so:som sr:srp sv:swe
sw:swh ta:tam te:tel tg:tgk th:tha tl:tgl tr:tur uk:ukr ur:urd uz:uzn vi:vie yo:yor zh:cmn
"""
ISO_639_3 = dict(pair.split(":") for pair in _CODES.split())
"""By the code of two letters that OpenAI's API has: the one of three that Seamless has."""
