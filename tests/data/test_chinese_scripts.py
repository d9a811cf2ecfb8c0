"""Simplified and traditional Chinese: by words, not by characters."""

import pytest

from allyouneed.apps.translate.chinese_scripts import is_traditional, to_simplified, to_traditional

PITFALLS = [  # one simplified character, several traditional ones
    ("头发", "頭髮"), ("发现", "發現"), ("出发", "出發"), ("理发", "理髮"),
    ("后来", "後來"), ("皇后", "皇后"), ("以后", "以後"),
    ("面条", "麵條"), ("面对", "面對"), ("里面", "裡面"), ("公里", "公里"), ("这里", "這裡"),
    ("干净", "乾淨"), ("干部", "幹部"), ("干涉", "干涉"), ("松树", "松樹"), ("放松", "放鬆"),
    ("一只船", "一隻船"), ("只有", "只有"), ("几乎", "幾乎"), ("茶几", "茶几"),
    ("系统", "系統"), ("关系", "關係"), ("钟表", "鐘錶"), ("表示", "表示"), ("台风", "颱風"), ("征服", "征服"),
]  # fmt: skip


@pytest.mark.parametrize(("simplified", "traditional"), PITFALLS)
def test_words_decide_which_character_is_meant(simplified, traditional):
    assert to_traditional(simplified) == traditional
    assert to_simplified(traditional) == simplified


def test_regions_have_their_own_words_and_the_length_never_changes():
    text = "这个软件的信息在网络上，博客里也有。"
    taiwan, hong_kong = to_traditional(text), to_traditional(text, "hk")
    assert to_traditional("软件和鼠标") == "軟體和滑鼠" and to_simplified("軟體和滑鼠") == "软件和鼠标"
    assert "軟件" in hong_kong and "裏" in hong_kong
    assert len(taiwan) == len(hong_kong) == len(text)  # 部落格 would be longer


def test_other_texts_stay_as_they_are():
    for text in (
        "",
        "Hello, world!",
        "日本語のテキスト",
        "干净的里面，皇后。",
        "\U000f0000 {name} https://example.com/頭",
    ):
        assert to_simplified(text) == text or is_traditional(text)
    assert not is_traditional("我们后来才发现这里面有问题。") and is_traditional("我們")
    long = "发" * 5000  # without punctuation: in linear time
    assert len(to_traditional(long)) == 5000
