"""A small program that publishes, to show how it is tested with a hub."""

import json
import urllib.request


def place(hub, number, customer):
    """Places an order, and tells the hub."""
    request = urllib.request.Request(
        f"{hub['http']}/publish/orders.placed",
        data=json.dumps({"order": number}).encode(),
        headers={"Authorization": f"Bearer {hub['token']}", "Content-Type": "application/json", "Event-Key": customer},
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.load(answer)["id"]
