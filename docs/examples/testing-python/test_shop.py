import urllib.error

import pytest

import shop


def test_an_order_is_an_event(hub, events):
    ids = [shop.place(hub, number, "ann") for number in (7, 8)]
    placed = events("orders.placed", 2)
    assert [event["id"] for event in placed] == ids
    assert [event["key"] for event in placed] == ["ann", "ann"]
    assert [event["payload"] for event in placed] == [{"order": 7}, {"order": 8}]


def test_a_shop_without_a_token_places_no_order(hub):
    with pytest.raises(urllib.error.HTTPError) as refused:
        shop.place({**hub, "token": "wrong"}, 9, "ann")
    refused.value.close()
    assert refused.value.code == 401
