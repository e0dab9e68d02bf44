/** Places an order, and tells the hub. */
export async function place(hub, number, customer) {
  const answer = await fetch(`${hub.http}/publish/orders.placed`, {
    method: "POST",
    headers: { Authorization: `Bearer ${hub.token}`, "Content-Type": "application/json", "Event-Key": customer },
    body: JSON.stringify({ order: number }),
  });
  if (!answer.ok) throw new Error(`place order ${number}: ${(await answer.json()).error}`);
}
