-- Open a slice for appending: the first writer's score becomes its incarnation. Returns that incarnation (20 bits).
local function open_slice(slices, name, score)
  redis.call('ZADD', slices, 'NX', score, name)
  local g = tonumber(redis.call('ZSCORE', slices, name))
  return (g - math.floor(g)) * 1048576
end
