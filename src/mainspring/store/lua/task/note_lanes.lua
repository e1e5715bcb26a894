-- Note in which lanes ids are put, so that an id alone leads to its tasks.
--
-- KEYS  n, lanes of each id
-- ARGV  now in ms, then per id: until when its lane is noted, in ms, and the lane
-- returns nothing
-- keeps: a note stays as long as the latest call asked for; the key of an id goes with its last note. More old notes
--   are removed than new ones added, but never many at once.
local now = tonumber(ARGV[1])
for i = 2, #KEYS do
  local lanes, until_ms, lane = KEYS[i], ARGV[i * 2 - 2], ARGV[i * 2 - 1]
  local left = tonumber(until_ms) - now
  local over = redis.call('ZRANGE', lanes, '-inf', now, 'BYSCORE', 'LIMIT', 0, 16)
  if #over > 0 then redis.call('ZREM', lanes, unpack(over)) end
  redis.call('ZADD', lanes, 'GT', until_ms, lane)
  redis.call('PEXPIRE', lanes, left, 'NX')
  redis.call('PEXPIRE', lanes, left, 'GT')
end
redis.call('HINCRBY', KEYS[1], 'ids_in_lanes', #KEYS - 1)
