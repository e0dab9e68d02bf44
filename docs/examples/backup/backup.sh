#!/bin/sh
# Backs up a running hub with NATS inside, and tries the backup. Keeps the seven newest. For cron:
#
#   EVENTHUB_OPS_URL=http://127.0.0.1:8082 EVENTHUB_TOKEN=... backup.sh /var/backups/eventhub
set -eu
cd "$1"
file=eventhub-$(date -u +%Y%m%dT%H%M%SZ).backup
eventhub backup "$file"

# A backup that can be restored is a good one.
trial=$(mktemp -d)
trap 'rm -rf "$trial"' EXIT
eventhub restore "$file" --data="$trial/data"

ls eventhub-*.backup | sort -r | tail -n +8 | while read -r old; do rm -- "$old"; done
