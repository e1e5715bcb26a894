-- Return the incarnation of an existing slice (20 bits): the fraction of its score.
local function incarnation_of(slices, name)
  local g = tonumber(redis.call('ZSCORE', slices, name))
  return (g - math.floor(g)) * 1048576
end

-- Open a slice for appending: the first writer's score becomes its incarnation. Return that incarnation.
local function open_slice(slices, name, score)
  local g = redis.call('ZSCORE', slices, name)
  if not g then
    redis.call('ZADD', slices, score, name)
    g = score
  end
  g = tonumber(g)
  return (g - math.floor(g)) * 1048576
end
