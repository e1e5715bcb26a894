-- Close the window of a digest, so that later notices go to the next one, and return all that the box holds.
--
-- KEYS  box
-- ARGV  window in ms
-- returns {time in us, the fields of the box and their values}
-- keeps: repeated, it returns the same notices for the window until they are removed.
local now = now_us()
if redis.call('HGET', KEYS[1], 'due') == ARGV[1] then
  redis.call('HSET', KEYS[1], 'last', ARGV[1])
  redis.call('HDEL', KEYS[1], 'due')
end
return {now, redis.call('HGETALL', KEYS[1])}
