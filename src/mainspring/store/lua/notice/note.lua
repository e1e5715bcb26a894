-- Change fields of a hash if one of them still has the value that was read: otherwise another node was faster.
--
-- KEYS  hash
-- ARGV  field, its value as it was read ('' = none), its new value, then per further field: field, value ('' = remove)
-- returns 1, or 0 if the first field has changed
-- keeps: what was decided from one state of the hash is never written over another.
local hash = KEYS[1]
if (redis.call('HGET', hash, ARGV[1]) or '') ~= ARGV[2] then return 0 end
local gone = {}
-- Write before removing: a hash that becomes empty is gone, and cannot be made again while its slot is moving.
redis.call('HSET', hash, ARGV[1], ARGV[3])
for i = 4, #ARGV - 1, 2 do
  if ARGV[i + 1] ~= '' then redis.call('HSET', hash, ARGV[i], ARGV[i + 1]) else gone[#gone + 1] = ARGV[i] end
end
if #gone > 0 then redis.call('HDEL', hash, unpack(gone)) end
return 1
