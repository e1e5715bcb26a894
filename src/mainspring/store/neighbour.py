"""Another namespace on the same servers, over the connections that are open already."""

from ..model.errors import Refused
from .keys import Keyspace, check_namespace, meta_key, slot_of
from .store import FORMAT, Store
from .wire import Command


async def neighbour(store: Store, namespace: str) -> Store | None:
    """A store for it; None when there is no such namespace, or none that this version (or this user) may read."""
    check_namespace(namespace)
    ask: Command = ("HMGET", meta_key(namespace), "format", "partitions")
    try:
        [known] = await store.run_one(slot_of(namespace), [ask])
    except Refused:
        return None  # the server's own rules keep it from us, or the key is another program's
    found_format, partitions = ((int(raw) if raw and raw.isdigit() else 0) for raw in known)
    if found_format != FORMAT or not 1 <= partitions <= 4096:
        return None
    return Store(store.links, Keyspace(namespace, partitions), store.clock)
