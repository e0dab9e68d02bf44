#!/bin/sh
# Moves a hub from NATS inside to NATS servers of your own, and starts it there. Stop the hub
# before. The data directory stays as it is, and the hub needs it for its outbox and its token:
#
#   move.sh /var/lib/eventhub nats://n1:4222,nats://n2:4222,nats://n3:4222
#
# With three servers, set EVENTHUB_REPLICAS=3.
set -eu
export EVENTHUB_DATA="$1" NATS_URL="$2"
eventhub migrate
exec eventhub serve
