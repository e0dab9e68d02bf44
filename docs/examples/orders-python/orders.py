"""An order service in plain SQL.

It stores an order, and the event that tells of it, in one transaction of its
own database: both are there, or neither is. A hub publishes the event, now or
when it runs again.

    eventhub outbox migrate --dsn=sqlite:orders.db
    python3 docs/examples/orders-python/orders.py orders.db 1 ann
"""

import json
import sqlite3
import sys


def open_database(path):
    # The timeout lets the service and the hub wait for each other; WAL lets
    # them read beside each other. Transactions are begun by hand.
    db = sqlite3.connect(path, timeout=10, isolation_level=None)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("CREATE TABLE IF NOT EXISTS orders (number INTEGER PRIMARY KEY, customer TEXT NOT NULL)")
    return db


def place(db, number, customer):
    """Store an order and its event."""
    payload = json.dumps({"order": number, "customer": customer})
    with db:  # commits at the end, or rolls back when something is raised
        db.execute("BEGIN IMMEDIATE")
        # The topic, the key and the payload (docs/outbox.md has the other
        # columns). Events of one key are published in the order of their rows.
        db.execute(
            "INSERT INTO outbox (aggregatetype, aggregateid, payload) VALUES (?, ?, ?)",
            ("orders.placed", customer, payload),
        )
        db.execute("INSERT INTO orders (number, customer) VALUES (?, ?)", (number, customer))


def main(args):
    if len(args) != 3 or not args[1].isdecimal():
        sys.exit("usage: orders.py DATABASE NUMBER CUSTOMER")
    path, number, customer = args[0], int(args[1]), args[2]
    db = open_database(path)
    try:
        place(db, number, customer)
    except sqlite3.Error as error:
        sys.exit(f"orders.py: place order {number}: {error}")
    finally:
        db.close()
    print(f"order {number} is placed")


if __name__ == "__main__":
    main(sys.argv[1:])
