"""Planted bugs in the scripts: what the server forgets to check or to write."""

from typing import Final

from .kinds import Mutation, Rewrite

_JUDGED: Final = "    status = judge(have, ARGV[a + 2])\n    fresh = false\n"
_TOKEN: Final = "  if not fence or string.sub(fence, 1, #token + 1) ~= token .. ':' then return 'fenced' end\n"
INCARNATION: Final = "  return score and tonumber(score) == g\n"
ONLY_THERE: Final = "  return score and g ~= nil\n"


def _token(name: str, bug: str, new: str) -> Mutation:
    return Mutation(name, bug, (Rewrite("_fence", _TOKEN, new),))


def _tick(name: str, bug: str, old: str, new: str) -> Mutation:
    return Mutation(name, bug, (Rewrite("tick", old, new),))


_BEGIN: Final = (
    _tick(
        "begin-without-token-check",
        "begin does not ask whose partition it is",
        _JUDGED,
        _JUDGED + "    if status == 'fenced' then status, fresh = nil, true end\n",
    ),
    _token(
        "token-compared-by-order",
        "the token is compared by >=: one of the same epoch passes whoever made it",
        "  local function epoch(text) return tonumber(string.match(text, '^%d+')) end\n"
        "  if not fence or epoch(fence) > epoch(token) then return 'fenced' end\n",
    ),
    _token(
        "token-compared-by-epoch",
        "of the token only the epoch is compared, not the nonce",
        "  if not fence or string.match(fence, '^%d+') ~= string.match(token, '^%d+') then return 'fenced' end\n",
    ),
    _token(
        "missing-token-passes",
        "no token on the server counts as 'nobody else', as it does where tokens have a time to live",
        "  if not fence then return nil end\n" + _TOKEN,
    ),
    _tick(
        "late-duplicate-writes-again",
        "begin does not look at its number: an old call that arrives late is done once more",
        _JUDGED,
        _JUDGED + "    if status == 'repeated' then status, fresh = nil, true end\n",
    ),
    Mutation(
        "rollback-not-noticed",
        "a server that forgot calls it had answered is written to as if nothing had happened",
        (
            Rewrite("_fence", "  if seq > have + 1 then return 'rolledback' end\n", ""),
            Rewrite("tick", _JUDGED, _JUDGED + "    fresh = status == nil\n"),
        ),
    ),
    _tick(
        "early-check-off",
        "begin trusts the owner that the time has come",
        "local early = latest and latest * 1000 > now\n",
        "local early = false\n",
    ),
    Mutation(
        "no-incarnation-check",
        "a slice that was dropped and recreated passes for the one that was read",
        (Rewrite("_entry", INCARNATION, ONLY_THERE),),
    ),
    Mutation(
        "header-not-proven",
        "begin does not compare the last row the owner read with the one that stands there",
        (
            Rewrite(
                "_entry",
                "  return string.sub(entry, 1, 4) .. string.sub(entry, 6, 21) == header\n",
                "  return true\n",
            ),
        ),
    ),
    _tick(
        "cancelled-bits-not-returned",
        "begin does not tell the owner what was cancelled since it read",
        "      reply[i + 1] = values[small_at + i] or ''\n",
        "      reply[i + 1] = ''\n",
    ),
    _tick(
        "lanes-begin-without-more",
        "a lane's task begins although the server has rows that its owner did not read",
        "      status = 'more'\n",
        "      status = nil\n",
    ),
    _tick(
        "begin-without-fired-bits",
        "begin leaves no mark: who cancels cannot know that it is too late",
        "        writes[w + 1], writes[w + 2], w = KEYS[small_at + i + all_small], ARGV[small_arg + i], w + 2\n",
        "",
    ),
)

_COMMIT: Final = (
    Mutation(
        "commit-without-token-check",
        "commit does not ask whose partition it is",
        (
            Rewrite(
                "commit",
                "if status == 'repeated' and tasks == 0 then",
                "if status == 'fenced' then status = nil end\nif status == 'repeated' and tasks == 0 then",
            ),
        ),
    ),
    Mutation(
        "repeated-commit-writes-again",
        "a commit whose reply was lost and that is sent again puts its retries once more",
        (
            Rewrite(
                "commit",
                "if status == 'repeated' and tasks == 0 then",
                "if status == 'repeated' then status = nil end\nif status == 'repeated' then",
            ),
        ),
    ),
    Mutation(
        "run-kept-again-by-a-repeated-commit",
        "a commit whose reply was lost and that is sent again adds its runs to the history once more",
        (
            Rewrite(
                "commit",
                "if status == 'repeated' and tasks == 0 then return",
                "if status == 'repeated' then write_runs(now, ARGV[13]) end\n"
                "if status == 'repeated' and tasks == 0 then return",
            ),
        ),
    ),
    Mutation(
        "run-kept-twice",
        "a commit adds its runs to the history twice",
        (
            Rewrite(
                "commit",
                "write_runs(now, ARGV[13])\nreturn",
                "write_runs(now, ARGV[13])\nwrite_runs(now, ARGV[13])\nreturn",
            ),
        ),
    ),
    Mutation(
        "run-not-kept",
        "a commit writes what it has to write, and leaves out the history",
        (Rewrite("commit", "write_runs(now, ARGV[13])\nreturn", "return"),),
    ),
    Mutation(
        "done-without-dead-letter",
        "commit counts the death and marks the task done, and the dead letter is missing",
        (
            Rewrite(
                "commit",
                "  redis.call('HSET', dead, ARGV[a + 1], ARGV[a + 2])\n"
                "  redis.call('ZADD', dead_times, ARGV[a + 3], ARGV[a + 1])\n",
                "",
            ),
        ),
    ),
    _tick(
        "done-bits-not-written",
        "what finished is counted, but its done bits stay as they were",
        "          writes[w + 1], writes[w + 2], w = KEYS[commit_key + i + 1], ARGV[at + 2], w + 2\n",
        "",
    ),
)

_OPEN: Final = "  if first_open < length then return {now, 'refused'} end\n"
_DROP: Final = (
    Mutation(
        "drop-without-done-check",
        "drop believes the owner that all is done",
        (Rewrite("drop", _OPEN, ""),),
    ),
    Mutation(
        "drop-by-count-only",
        "drop counts whether there are as many bits as entries, not whether they are set",
        (Rewrite("drop", _OPEN, "  if redis.call('STRLEN', KEYS[5]) * 8 < length then return {now, 'refused'} end\n"),),
    ),
    Mutation(
        "drop-of-a-recreated-slice",
        "drop goes by the slice's name alone",
        (
            Rewrite(
                "drop",
                "if not same_incarnation(KEYS[2], ARGV[2], tonumber(ARGV[3])) then return {now, 'stale'} end\n",
                "",
            ),
            Rewrite("drop", _OPEN, ""),
        ),
    ),
)

_CANCEL: Final = (
    Mutation(
        "cancel-after-begin",
        "cancel answers 'cancelled' for a task that is under way",
        (Rewrite("cancel", "  if is_set(fired, first) then return 'too late' end\n", ""),),
    ),
    Mutation(
        "cancel-without-mark",
        "cancel removes the entry, but an owner that has read it is not told",
        (Rewrite("cancel", "  redis.call('SETBIT', x, first, 1)\n", ""),),
    ),
    Mutation(
        "bulk-cancel-without-mark",
        "cancelling many at once removes the entries, but an owner that has read them is not told",
        (Rewrite("cancel", "  redis.call('SET', x, table.concat(all))\n", ""),),
    ),
    Mutation(
        "replace-leaves-the-old",
        "a task that is moved stands at both times",
        (
            Rewrite("replace", "  bury(KEYS[5], old, old_index, first, 24, address)  -- TOMBSTONE and FORWARD\n", ""),
            Rewrite("replace", "  redis.call('SETBIT', KEYS[7], first, 1)\n", ""),
        ),
    ),
    Mutation(
        "replace-without-mark",
        "a task is moved, but an owner that has read it at its old place is not told",
        (Rewrite("replace", "  redis.call('SETBIT', KEYS[7], first, 1)\n", ""),),
    ),
    Mutation(
        "replace-after-begin",
        "a task that is under way can still be moved",
        (Rewrite("replace", "  if redis.call('GETBIT', KEYS[6], first) == 1 then return {'too late'} end\n", ""),),
    ),
    Mutation(
        "known-id-put-again",
        "a repeated request with the same id is another task",
        (Rewrite("put_ids", "local known = redis.call('HMGET', ids, unpack(idhs))\n", "local known = {}\n"),),
    ),
)

_ACQUIRE_READ: Final = "local lease_end = tonumber(stored[2]) or 0\n"
_OWN: Final = (
    Mutation(
        "ttl-on-the-token",
        "the token lives as long as the lease, and the epoch is forgotten with it",
        (
            # A time to live that passes by the clock the test holds.
            Rewrite(
                "acquire",
                _ACQUIRE_READ,
                _ACQUIRE_READ + "if lease_end <= now_ms then stored = {false, false, false, false} end\n",
            ),
        ),
    ),
    Mutation(
        "epoch-from-the-clock",
        "the epoch is the time, and does not grow where a clock goes back",
        (Rewrite("acquire", "math.max((tonumber(stored[3]) or 0) + 1, now)", "now"),),
    ),
    Mutation(
        "lease-not-clamped",
        "a lease that ends far in the future, by the clock of a server that is gone, is waited for",
        (Rewrite("acquire", "if lease_end > furthest then\n", "if false then\n"),),
    ),
    Mutation(
        "busy-ignored",
        "a partition is taken from an owner that is alive",
        (
            Rewrite(
                "acquire",
                "if free_at > now_ms and stored[1] ~= ARGV[1] then"
                " return {now, 'busy', stored[1] or '', free_at - now_ms} end\n",
                "",
            ),
        ),
    ),
    Mutation(
        "release-without-token-check",
        "a former owner that stops gives away what another one has",
        (Rewrite("release", "if token ~= ARGV[1] then return {now, 'fenced'} end\n", ""),),
    ),
)

SCRIPTS: Final = (*_BEGIN, *_COMMIT, *_DROP, *_CANCEL, *_OWN)
