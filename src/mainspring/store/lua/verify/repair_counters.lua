-- Repair the counters of a partition.
--
-- KEYS  n
-- ARGV  the number of repairs when the counters were read, by how much `accepted` grows
-- returns 'changed' (something was repaired since: read again) or 'ok'
-- keeps: whatever is put, fired, finished or cancelled meanwhile changes both sides of the sum alike, so what was
--   missing then is missing now. Only another repair could have changed that, and repairs are counted. By how much
--   `accepted` falls is added to `written_off`: their sum never falls, so owners do not report a loss.
local known = redis.call('HGET', KEYS[1], 'repairs') or '0'
if known ~= ARGV[1] then return 'changed' end
for _, name in ipairs({'accepted', 'queued', 'done', 'cancelled', 'replaced', 'dead', 'retried', 'spilled', 'repairs', 'written_off'}) do
  local value = redis.call('HGET', KEYS[1], name)
  if value and not string.find(value, '^-?%d+$') then redis.call('HSET', KEYS[1], name, 0) end
end
redis.call('HINCRBY', KEYS[1], 'accepted', ARGV[2])
if tonumber(ARGV[2]) < 0 then redis.call('HINCRBY', KEYS[1], 'written_off', -ARGV[2]) end
redis.call('HINCRBY', KEYS[1], 'repairs', 1)
return 'ok'
