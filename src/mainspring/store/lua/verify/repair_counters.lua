-- Repair the counters of a partition.
--
-- KEYS  n
-- ARGV  the number of repairs when the counters were read, the change of `accepted`
-- returns 'changed' (another repair was made since: read again) or 'ok'
-- keeps: tasks put, fired, finished or cancelled meanwhile change both sides of the sum alike, so tasks missing then are
--   missing now. Only another repair could have changed that, and repairs are counted. The amount by which `accepted`
--   falls is added to `written_off`: their sum never falls, so owners do not report a loss.
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
