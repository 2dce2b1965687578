"""Which competences the skills in a prompt switch on, or off: recognised by what their sentences mean.

There is no magic word. A sentence teaches a competence when it speaks of its subject (budget, variants, attributes,
...) and of its deed (check, choose, go back, ...), in English or Chinese. A sentence that tells to skip the deed
unteaches it, so that harmful skills do harm; a double negation ("never skip the price check") teaches.
"""

from __future__ import annotations

import re
from functools import lru_cache

COMPETENCES = (
    "query_formulation",
    "attribute_check",
    "option_matching",
    "budget_check",
    "persona_preference",
    "pagination",
)

_I = re.IGNORECASE
_CHECK = (
    r"check|verif|confirm|compar|make sure|ensure|inspect|look at|read|match|satisf|meet|contain|cover|list"
    r"|核对|检查|确认|比对|比较|核实|验证|查看|对照|满足|符合|包含|齐全|逐一|逐项"
)
_SUBJECTS: dict[str, tuple[re.Pattern[str], re.Pattern[str]]] = {
    "query_formulation": (
        re.compile(r"\b(?:search|quer(?:y|ies)|keywords?)\b|搜索|检索|查询|关键词|搜索词", _I),
        re.compile(
            r"attribute|feature|specific|brand|categor|product (?:type|name)|noun|required|key (?:words|terms)|combine"
            r"|属性|特征|卖点|品类|类目|类别|品牌|具体|组合|核心词|商品名|需求词",
            _I,
        ),
    ),
    "attribute_check": (
        re.compile(r"attribute|feature|requirement|property|properties|属性|特征|卖点|功能要求|特性", _I),
        re.compile(rf"{_CHECK}|every|each|all (?:of )?the|only open|全部|每[一个项条]|所有|都", _I),
    ),
    "option_matching": (
        re.compile(
            r"\boptions?\b|variants?|colou?rs?\b|\bsizes?\b|specification|\bspecs?\b|规格|选项|款式|颜色|尺码|型号|变体",
            _I,
        ),
        re.compile(
            r"choos|select|pick|match|named|asked|exact|correspond|选择|选中|选对|匹配|对应|一致|挑选|选取|指定", _I
        ),
    ),
    "budget_check": (
        re.compile(r"budget|price|cost|afford|expensive|cheap|spend|预算|价格|价位|售价|超支|花费|金额", _I),
        re.compile(
            rf"{_CHECK}|below|under|within|exceed|above|over|at most|before (?:you )?(?:buy|purchas|click)|limit|too"
            r"|低于|不超|不高于|以内|之内|超过|超出|购买前|下单前|上限|另选|更便宜",
            _I,
        ),
    ),
    "persona_preference": (
        re.compile(
            r"persona|profile|preference|user'?s? (?:history|taste|recent)|画像|偏好|喜好|人设|用户历史|最近搜索", _I
        ),
        re.compile(
            r"prefer|favou?r|fit|match|use|consider|follow|read|respect|take into account|add|complete"
            r"|优先|参考|结合|考虑|符合|匹配|补充|利用|遵循|依据|根据|读取",
            _I,
        ),
    ),
    "pagination": (
        re.compile(
            r"next page|more pages|pages? of results|turn(?:ing)? (?:the )?pages?|go(?:ing)? back|back to|previous"
            r"|paginat"
            r"|another (?:result|product|candidate)|other (?:results|products|candidates)|search again"
            r"|翻页|下一页|后续页|返回|回到|退回|重新搜索|换一个|其他商品|其他结果|下一个商品|另一个",
            _I,
        ),
        re.compile(
            r"\bif\b|when|unless|until|none|no (?:result|product|candidate|match)|not |fail|instead|keep|try|rather"
            r"|如果|若|当|没有|不符|不满足|不合适|不匹配|直到|继续|尝试|否则|再|而不是",
            _I,
        ),
    ),
}
_DOUBLE = re.compile(
    r"(?:never|do not|don't|must not|without ever)\s+(?:skip|ignor|forget|omit|neglect)\w*"
    r"|(?:不要|不能|切勿|不可|别|绝不|勿)(?:跳过|忽略|忘记|省略|忽视)",
    _I,
)
_SKIP = re.compile(
    r"\b(?:skip|ignor|disregard|neglect|never mind|forget)\w*|\bno need to\b"
    r"|\bdon'?t (?:bother|worry|check|compare|read|verify)"
    r"|\bdo not (?:bother|worry|check|compare|read|verify)|\bnever (?:check|compare|read|verify)"
    r"|\bwithout (?:check|compar|read|verify)\w*|does not matter|doesn't matter|irrelevant"
    r"|无需|不必|不用|忽略|跳过|不要(?:检查|核对|比较|管|看)|别管|无所谓|不重要",
    _I,
)
_SENTENCE = re.compile(r"(?<=[.!?;])\s+|[。！？；\n]+")


@lru_cache(maxsize=1024)
def taught(skills: str) -> tuple[frozenset[str], frozenset[str]]:
    """``(switched on, switched off)`` by the text of a skills section. Off wins where both are said."""
    on: set[str] = set()
    off: set[str] = set()
    for sentence in filter(str.strip, _SENTENCE.split(skills)):
        plain = _DOUBLE.sub(" ", sentence)
        negative = _SKIP.search(plain) is not None
        if negative:
            # only what stands near the skipping is skipped: the clause, not the whole sentence
            for clause in re.split(r"[,，、:：]|\band\b|\bbut\b", plain):
                if _SKIP.search(clause):
                    off.update(name for name, (subject, _) in _SUBJECTS.items() if subject.search(clause))
            continue
        doubly = plain != sentence
        for name, (subject, deed) in _SUBJECTS.items():
            if subject.search(sentence) and (doubly or deed.search(sentence)):
                on.add(name)
    return frozenset(on - off), frozenset(off)
