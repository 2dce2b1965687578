"""Words of the generated catalogue: twelve categories, brands, colours, personas.

Invariants (checked by tests): within a category no attribute matches another one fuzzily or as a substring, and none
occurs in a noun, brand or colour, so that a product has exactly the attributes it lists. The same holds among colours
and among sizes.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Word:
    """A thing in Chinese and English."""

    zh: str
    en: str

    @property
    def both(self) -> str:
        """How a bilingual catalogue writes it."""
        return f"{self.zh} {self.en}"


@dataclass(frozen=True, slots=True)
class Category:
    """One kind of product. Prices are yuan; ``sizes`` is empty where size is no option."""

    path: str
    noun: Word
    low: int
    high: int
    attributes: tuple[Word, ...]
    sizes: tuple[str, ...] = ()


def _words(*pairs: str) -> tuple[Word, ...]:
    return tuple(Word(*pair.split("|")) for pair in pairs)


_CLOTHES = ("S", "M", "L", "XL")
_SHOES = ("38", "39", "40", "41", "42")

CATEGORIES = (
    Category(
        "家居用品›床上用品›枕头",
        Word("乳胶枕", "pillow"),
        60,
        700,
        _words(
            "护颈|neck support",
            "可拆洗|washable cover",
            "透气|breathable",
            "高回弹|high rebound",
            "泰国乳胶|thai latex",
            "防螨|mite proof",
            "可调高度|adjustable height",
            "凉感|cooling",
        ),
        ("标准", "加长"),
    ),
    Category(
        "数码›音频设备›耳机",
        Word("蓝牙耳机", "earphone"),
        80,
        1200,
        _words(
            "主动降噪|noise cancelling",
            "低延迟|low latency",
            "长续航|long battery",
            "入耳式|in-ear",
            "防水|waterproof",
            "骨传导|bone conduction",
            "无线充电|wireless charging",
            "双设备连接|dual pairing",
        ),
    ),
    Category(
        "家用电器›厨房电器›电饭煲",
        Word("电饭煲", "rice cooker"),
        120,
        1500,
        _words(
            "柴火饭|firewood taste",
            "IH加热|induction heating",
            "智能预约|smart timer",
            "大容量|large capacity",
            "不粘内胆|nonstick pot",
            "低糖|low sugar",
            "快煮|fast cook",
            "可拆上盖|detachable lid",
        ),
        ("3升", "4升", "5升"),
    ),
    Category(
        "运动户外›运动鞋›跑步鞋",
        Word("跑步鞋", "running shoes"),
        120,
        1300,
        _words(
            "轻便|lightweight",
            "透气网面|mesh upper",
            "宽楦|wide fit",
            "防滑|anti slip",
            "缓震|cushioned",
            "碳板|carbon plate",
            "反光|reflective",
            "耐磨大底|durable outsole",
        ),
        _SHOES,
    ),
    Category(
        "家居用品›杯具›保温杯",
        Word("保温杯", "vacuum cup"),
        30,
        400,
        _words(
            "316不锈钢|grade 316",
            "长效保温|long heat retention",
            "防漏|leakproof",
            "便携|portable",
            "茶水分离|tea infuser",
            "弹盖|flip lid",
            "陶瓷内胆|ceramic lining",
            "显温|temperature display",
        ),
        ("350毫升", "500毫升", "750毫升"),
    ),
    Category(
        "箱包›背包›双肩包",
        Word("双肩包", "backpack"),
        80,
        900,
        _words(
            "笔记本隔层|laptop sleeve",
            "减负|weight relief",
            "防泼水|water repellent",
            "防盗|anti theft",
            "可扩展|expandable",
            "USB接口|usb port",
            "胸扣|chest strap",
            "鞋仓|shoe pocket",
        ),
    ),
    Category(
        "家居用品›灯具›台灯",
        Word("台灯", "desk lamp"),
        60,
        800,
        _words(
            "护眼|eye care",
            "可折叠|foldable",
            "触控|touch control",
            "无极调光|stepless dimming",
            "国AA级|AA grade",
            "充电式|rechargeable",
            "夹持式|clip-on",
            "感光调节|ambient sensor",
        ),
    ),
    Category(
        "运动户外›健身›瑜伽垫",
        Word("瑜伽垫", "yoga mat"),
        40,
        500,
        _words(
            "TPE材质|tpe material",
            "加厚|thick",
            "环保|eco friendly",
            "体位线|alignment lines",
            "天然橡胶|natural rubber",
            "加宽|wide surface",
            "带绑带|with strap",
            "吸汗|sweat absorbing",
        ),
        ("6毫米", "8毫米", "10毫米"),
    ),
    Category(
        "服饰›外套›羽绒服",
        Word("羽绒服", "down jacket"),
        200,
        2400,
        _words(
            "90白鸭绒|white duck down",
            "修身|slim cut",
            "短款|cropped",
            "长款|knee length",
            "连帽|hooded",
            "可机洗|machine wash",
            "防风|windproof",
            "立领|stand collar",
        ),
        _CLOTHES,
    ),
    Category(
        "家用电器›厨房电器›咖啡机",
        Word("咖啡机", "coffee machine"),
        300,
        3600,
        _words(
            "全自动|fully automatic",
            "意式浓缩|espresso",
            "易清洗|easy clean",
            "奶泡|milk froth",
            "15bar泵压|15bar pump",
            "研磨一体|built-in grinder",
            "双锅炉|dual boiler",
            "胶囊兼容|capsule ready",
        ),
    ),
    Category(
        "母婴用品›出行›婴儿推车",
        Word("婴儿推车", "stroller"),
        250,
        2800,
        _words(
            "可登机|cabin size",
            "双向推行|reversible seat",
            "一键收车|one hand fold",
            "可平躺|lie flat",
            "高景观|high view",
            "避震|shock absorber",
            "遮阳篷|sun canopy",
            "大储物篮|large basket",
        ),
    ),
    Category(
        "宠物用品›饮食用具›喂食器",
        Word("宠物喂食器", "pet feeder"),
        70,
        900,
        _words(
            "定时定量|portion timer",
            "摄像头|camera",
            "双电源|dual power",
            "密封保鲜|sealed storage",
            "不锈钢碗|steel bowl",
            "语音呼唤|voice call",
            "防卡粮|anti jam",
            "多宠识别|multi pet",
        ),
        ("2升", "6升"),
    ),
)

BRANDS = ("Luma", "Nordik", "KAIYO", "Aster", "Velora", "Hemlo", "沐川", "北辰", "云栖", "千叶", "青禾", "木石")

COLOURS = _words(
    "黑色|black",
    "白色|white",
    "米色|beige",
    "墨绿|forest green",
    "雾霾蓝|haze blue",
    "玫瑰金|rose/gold",
    "酒红|burgundy",
    "浅灰|grey",
)

COLOUR_AXIS = "颜色分类"
SIZE_AXIS = "尺码"

AGES = ("18-24", "25-34", "35-44", "45-54")
STYLES = ("简约", "复古", "运动", "田园")
