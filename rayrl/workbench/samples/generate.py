"""The sample data set: 600 in-car requests with fast/slow labels, made from a seed.

The labels are those of a person who asks "can one function of the car do this at once?", request type by request type;
they are written beside the wording, not derived from the sample Skill's rules. Some types are ambiguous (two annotators
would differ; the label is drawn), and a few labels are slips, as in any real set; both are marked in the metadata.
"""

from __future__ import annotations

import csv
import io
import json
from dataclasses import dataclass
from random import Random
from typing import Any

SEED = 20
N = 600
NOISE = 0.03


@dataclass(frozen=True)
class Kind:
    """One type of request: its wordings with slots, and how a person labels it (``None``: ambiguous)."""

    domain: str
    label: str | None
    wordings: tuple[str, ...]
    history: tuple[str, ...] = ()


SLOTS: dict[str, tuple[str, ...]] = {
    "place": (
        "虹桥火车站",
        "浦东机场",
        "西湖",
        "公司",
        "人民广场",
        "奥体中心",
        "老家",
        "大学城",
        "外滩",
        "市一医院",
        "南京南站",
        "青岛",
    ),
    "person": ("妈妈", "老王", "李经理", "张伟", "客户陈总", "女儿", "物业", "小美"),
    "song": ("晴天", "夜曲", "平凡之路", "稻香", "孤勇者", "成都", "后来", "Yesterday"),
    "artist": ("周杰伦", "陈奕迅", "王菲", "朴树", "五月天", "Taylor Swift"),
    "city": ("上海", "杭州", "北京", "成都", "南京", "厦门", "苏州"),
    "temp": ("二十二", "24", "二十六", "20", "18"),
    "day": ("今天", "明天", "后天", "周末", "下周一"),
    "side": ("主驾", "副驾", "左后", "右后", "后排"),
    "food": ("川菜", "本帮菜", "火锅", "咖啡", "素食", "烤肉"),
    "num": ("两", "三", "四", "五"),
    "stock": ("宁德时代", "特斯拉", "比亚迪", "茅台"),
    "level": ("最大", "最小", "百分之三十", "五十", "低一点"),
}

KINDS: tuple[Kind, ...] = (
    Kind(
        "地图导航",
        "fast",
        ("导航去{place}", "带我去{place}", "我要去{place}", "去{place}怎么开", "{place}，走起", "设个目的地，{place}"),
    ),
    Kind(
        "地图导航",
        "fast",
        ("到{place}电量够不够", "开到{place}还剩多少电", "现在还能跑多远", "续航还有多少", "去{place}电够吗"),
    ),
    Kind(
        "地图导航",
        "fast",
        ("附近的充电桩", "找个最近的停车场", "前面哪儿能加油", "沿途有没有服务区", "最近的洗手间在哪"),
    ),
    Kind(
        "地图导航",
        "fast",
        ("到{place}还有多久", "前面堵不堵", "{place}那边路况怎么样", "还有几公里到{place}"),
        ("导航去{place}",),
    ),
    Kind("地图导航", "fast", ("不走高速", "换一条路线", "避开收费路段", "走那条快一点的"), ("导航去{place}",)),
    Kind(
        "地图导航",
        "slow",
        (
            "{day}想去{place}玩{num}天，帮我规划一下",
            "安排一个{city}周边的{num}日自驾游",
            "{day}带孩子去{place}，有什么攻略",
        ),
    ),
    Kind(
        "地图导航",
        "slow",
        (
            "去{place}中途要充电几次，在哪充合适",
            "开到{place}中途充电怎么排最省时间",
            "电量不够的话去{place}要在哪里充电几次",
        ),
    ),
    Kind(
        "地图导航",
        "slow",
        (
            "先去接{person}，然后到{place}，赶得上六点的高铁吗",
            "{day}早上九点到{place}开会，几点出发比较稳",
            "去{place}开车和坐地铁哪个更快",
        ),
    ),
    Kind(
        "地图导航",
        "slow",
        (
            "找一家停车方便、人均一百以内、适合带老人的{food}馆",
            "推荐一个离{place}不远又安静的咖啡馆",
            "{place}附近评分高的{food}哪家更划算",
        ),
    ),
    Kind("地图导航", None, ("{place}附近有什么好吃的", "顺路找个{food}", "去{place}哪条路好走", "前面要不要绕一下")),
    Kind(
        "车控",
        "fast",
        ("打开空调", "空调调到{temp}度", "把温度调低一点", "风量{level}", "打开前挡除雾", "关掉空调", "内循环打开"),
    ),
    Kind(
        "车控",
        "fast",
        ("打开{side}车窗", "{side}车窗开一半", "关上天窗", "打开后备箱", "大灯打开", "氛围灯换成蓝色", "雨刷快一点"),
    ),
    Kind(
        "车控",
        "fast",
        (
            "{side}座椅加热打开",
            "座椅往后一点",
            "打开方向盘加热",
            "{side}座椅通风{level}",
            "打开香氛",
            "给{side}按摩一下",
        ),
    ),
    Kind("车控", "fast", ("有点热", "好冷啊", "车里太闷了", "玻璃起雾了看不清", "太晒了", "脚有点凉")),
    Kind(
        "车控",
        "slow",
        ("{person}上车就睡着了，你看着办", "把车里氛围搞得浪漫一点", "布置成适合睡觉的环境，四十分钟后叫醒我"),
    ),
    Kind(
        "车控",
        "slow",
        (
            "如果外面下雨就把天窗关上",
            "到{place}之前十分钟把座椅加热打开，然后提醒我拿东西",
            "温度超过{temp}度的话再开空调",
        ),
    ),
    Kind("车控", None, ("把车里弄舒服点", "别吹我", "开一点窗透透气，别太吵", "调到{person}喜欢的样子")),
    Kind(
        "媒体",
        "fast",
        ("播放{song}", "放一首{artist}的歌", "下一首", "音量{level}", "暂停", "来点轻音乐", "打开交通广播电台"),
    ),
    Kind("媒体", "fast", ("继续播放刚才的有声书", "大声一点", "收藏这首歌", "单曲循环", "这首歌叫什么名字")),
    Kind(
        "媒体",
        "slow",
        (
            "找一首歌，副歌好像是关于夏天和海边的，女声",
            "按我最近的心情排一个一小时的歌单",
            "放那种适合雨天开车、又不会犯困的歌",
        ),
    ),
    Kind("媒体", "slow", ("{artist}和{artist}的风格有什么区别，各放一首代表作", "讲讲{song}这首歌背后的故事")),
    Kind("媒体", None, ("放点应景的", "换个没听过的", "来点{artist}那种感觉的", "孩子能听的")),
    Kind(
        "通讯",
        "fast",
        ("打电话给{person}", "给{person}打电话", "拨打10086", "接听", "挂掉", "回拨刚才的号码", "连上蓝牙"),
    ),
    Kind(
        "通讯",
        "fast",
        ("给{person}发微信说我堵车了晚到十分钟", "读一下消息", "给{person}发短信，我到楼下了", "念一下最新的短信"),
    ),
    Kind(
        "通讯",
        "slow",
        (
            "帮我想个理由委婉地推掉{person}的饭局，发给他",
            "给{person}写一段生日祝福，要有文采",
            "总结一下工作群今天聊了什么，挑要紧的回",
        ),
    ),
    Kind("通讯", None, ("跟{person}说一声", "回他说好的，顺便问问几点", "告诉{person}我快到了")),
    Kind(
        "信息查询",
        "fast",
        (
            "{day}{city}天气怎么样",
            "{city}{day}限行尾号是多少",
            "现在几点了",
            "{stock}现在股价多少",
            "今天油价",
            "{day}是星期几",
        ),
    ),
    Kind("信息查询", "fast", ("胎压多少", "总里程是多少", "下次保养还有多少公里", "电池健康度怎么样", "玻璃水还有吗")),
    Kind(
        "信息查询",
        "slow",
        ("为什么冬天续航掉这么多", "动能回收是什么原理", "方向盘抖是怎么回事", "仪表上亮了个黄色感叹号怎么办"),
    ),
    Kind(
        "信息查询",
        "slow",
        ("讲讲{place}的历史", "混动和纯电哪个更适合跑长途", "怎么看{stock}最近的走势", "解释一下最近的购车补贴政策"),
    ),
    Kind("信息查询", None, ("有什么新闻", "{city}有什么好玩的", "穿什么合适", "那边冷不冷")),
    Kind(
        "闲聊",
        "slow",
        ("陪我聊会儿天，我有点困", "给孩子讲个关于恐龙的睡前故事", "出个脑筋急转弯", "我今天被老板骂了，心情很差"),
    ),
    Kind("闲聊", "slow", ("你觉得人为什么要旅行", "用{city}话说一段相声", "编一首关于{place}的打油诗")),
    Kind("闲聊", None, ("讲个笑话", "你是谁", "唱首歌给我听", "你会做什么")),
    Kind("日程与生活", "fast", ("设一个七点的闹钟", "提醒我{day}交水电费", "打开行车记录仪", "{temp}分钟后提醒我")),
    Kind(
        "日程与生活",
        "slow",
        (
            "看看我{day}的安排，把能合并的会挪到一起",
            "订一家{day}晚上{num}个人的{food}，要包间，先问一下{person}能不能吃辣",
        ),
    ),
    Kind(
        "日程与生活", "slow", ("孩子发烧三十九度，我该先去哪家医院，路上要注意什么", "帮我比较一下这两份保险哪个划算")
    ),
)


def generate(n: int = N, seed: int = SEED) -> list[dict[str, Any]]:
    """Cases as dicts: ``id, query, label, domain, history, context, ambiguous, slip, annotator``."""
    random = Random(seed)
    out: list[dict[str, Any]] = []
    seen: set[str] = set()
    while len(out) < n:
        kind = random.choice(KINDS)
        query = _fill(random.choice(kind.wordings), random)
        if random.random() < 0.18:
            query = random.choice(("小艺，", "你好，", "麻烦", "那个，", "嗯……", "请")) + query
        if random.random() < 0.10:
            query += random.choice(("吧", "，谢谢", "啊", "，快点", "可以吗", "！"))
        history = [{"role": "user", "content": _fill(h, random)} for h in kind.history if random.random() < 0.6]
        if query in seen and random.random() < 0.93:
            continue
        seen.add(query)
        label = kind.label or random.choice(("fast", "slow"))
        slip = kind.label is not None and random.random() < NOISE
        if slip:
            label = "slow" if label == "fast" else "fast"
        context: dict[str, Any] = {"driving": random.random() < 0.8, "battery": random.randint(8, 98)}
        if random.random() < 0.3:
            context["city"] = random.choice(SLOTS["city"])
        out.append(
            {
                "id": f"{len(out) + 1:04d}",
                "query": query,
                "label": label,
                "domain": kind.domain,
                "history": history,
                "context": context,
                "ambiguous": kind.label is None,
                "slip": slip,
                "annotator": random.choice(("A", "B", "C")),
            }
        )
    return out


def _fill(wording: str, random: Random) -> str:
    for name, values in SLOTS.items():
        while f"{{{name}}}" in wording:
            wording = wording.replace(f"{{{name}}}", random.choice(values), 1)
    return wording


def as_jsonl(cases: list[dict[str, Any]]) -> bytes:
    """Nested JSON with English labels."""
    lines = []
    for c in cases:
        row = {
            "rid": f"req-{c['id']}",
            "data": {"id": c["id"], "query": c["query"], "history": c["history"], "context": c["context"]},
            "annotation": {
                "label": c["label"],
                "domain": c["domain"],
                "by": c["annotator"],
                "ambiguous": c["ambiguous"],
            },
        }
        lines.append(json.dumps(row, ensure_ascii=False))
    return ("\n".join(lines) + "\n").encode()


def as_csv(cases: list[dict[str, Any]]) -> bytes:
    """Chinese columns and labels, in GB18030, as a spreadsheet program saves them."""
    out = io.StringIO(newline="")
    writer = csv.writer(out)
    writer.writerow(["编号", "用户query", "人工标签", "垂域", "对话历史", "上下文", "标注人"])
    for c in cases:
        label = {"fast": "快", "slow": "慢"}[c["label"]]
        history = json.dumps(c["history"], ensure_ascii=False) if c["history"] else ""
        context = json.dumps(c["context"], ensure_ascii=False)
        writer.writerow([c["id"], c["query"], label, c["domain"], history, context, c["annotator"]])
    return out.getvalue().encode("gb18030")


def as_xlsx(cases: list[dict[str, Any]]) -> bytes:
    """Numeric labels (0 fast, 1 slow), ids as text."""
    import xlsxwriter  # type: ignore[import-untyped]

    out = io.BytesIO()
    book = xlsxwriter.Workbook(out, {"in_memory": True})
    sheet = book.add_worksheet("评测集")
    for column, name in enumerate(["id", "query", "label", "domain", "history", "context", "annotator"]):
        sheet.write_string(0, column, name)
    for row, c in enumerate(cases, 1):
        sheet.write_string(row, 0, c["id"])
        sheet.write_string(row, 1, c["query"])
        sheet.write_number(row, 2, 0 if c["label"] == "fast" else 1)
        sheet.write_string(row, 3, c["domain"])
        sheet.write_string(row, 4, json.dumps(c["history"], ensure_ascii=False) if c["history"] else "")
        sheet.write_string(row, 5, json.dumps(c["context"], ensure_ascii=False))
        sheet.write_string(row, 6, c["annotator"])
    book.close()
    return out.getvalue()
