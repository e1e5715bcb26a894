-- Unregister a node, so that its successor need not wait for its lease to end.
--
-- KEYS  nodes, beats
-- ARGV  id, nonce
-- returns 1 if it was registered, otherwise 0
local me = member(redis.call('HGET', KEYS[1], ARGV[1]))
if not me or me.nonce ~= ARGV[2] then return 0 end
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('ZREM', KEYS[2], ARGV[1])
return 1
