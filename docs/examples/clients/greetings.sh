#!/bin/sh
# Prints each greeting and acknowledges it, over plain HTTP. Needs curl and jq.
hub=${EVENTHUB_HTTP:-http://127.0.0.1:8081}
token=${EVENTHUB_TOKEN:-${WS_TOKEN:-$(cat eventhub-data/token)}}

post() { # PATH BODY
  curl --silent --show-error --header "Authorization: Bearer $token" --data "$2" "$hub$1"
}

post /groups/greetings/shell/pull '{"wait_ms":0}' >/dev/null # makes the group
post /publish/greetings '"hello from a shell"' >/dev/null
while :; do
  answer=$(post /groups/greetings/shell/pull '{"max":10,"wait_ms":30000}') || answer='{}'
  if [ "$(printf '%s' "$answer" | jq 'has("events")')" != true ]; then
    printf '%s\n' "$answer" | jq --raw-output '.error // "the hub does not answer"' >&2
    sleep 1
    continue
  fi
  printf '%s\n' "$answer" | jq --raw-output '.events[].event.payload'
  handles=$(printf '%s' "$answer" | jq --compact-output '{ack: [.events[].ack]}')
  [ "$handles" = '{"ack":[]}' ] || post /ack "$handles" >/dev/null
done
