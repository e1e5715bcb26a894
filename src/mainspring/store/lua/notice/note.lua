-- Change fields of a hash if each still has the value that was read: otherwise another node was faster.
--
-- KEYS  hash
-- ARGV  per field: field, its value as it was read ('' = none), its new value ('' = remove)
-- returns how often the hash was changed, or 0 if a field differs
-- keeps: a value that was decided from one state of a field never overwrites another state. Field '' counts the
--   changes.
local hash = KEYS[1]
for i = 1, #ARGV - 2, 3 do
  if (redis.call('HGET', hash, ARGV[i]) or '') ~= ARGV[i + 1] then return 0 end
end
-- Write before removing: a hash that becomes empty is gone, and cannot be made again while its slot is moving.
local changes = redis.call('HINCRBY', hash, '', 1)
for i = 1, #ARGV - 2, 3 do
  if ARGV[i + 2] ~= '' then redis.call('HSET', hash, ARGV[i], ARGV[i + 2]) else redis.call('HDEL', hash, ARGV[i]) end
end
return changes
