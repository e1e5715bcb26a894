-- Heartbeat of a node: renew it, forget nodes that are gone, and take the lead if it is this node's turn.
--
-- KEYS  nodes, beats, leader
-- ARGV  id, nonce, lease in ms, 1 when it is leaving, record
-- returns {time in us, 'gone'} when the node is not registered (any more), or
--   {time in us, 'ok', leader or '', its term, {per live node: id, order, ms until its lease ends, 1 when leaving, record}}
-- keeps: the leader is a live node that is not leaving; if there is none, the oldest such node takes the lead with a
--   new term. A node leads no longer than its own lease, so a disconnected node knows when to step down.
local now = now_us()
local now_ms = math.floor(now / 1000)
local me = member(redis.call('HGET', KEYS[1], ARGV[1]))
local mine = tonumber(redis.call('ZSCORE', KEYS[2], ARGV[1]) or 0)
if not me or me.nonce ~= ARGV[2] or mine <= now_ms then return {now, 'gone'} end
redis.call('HSET', KEYS[1], ARGV[1], me.order .. ':' .. ARGV[2] .. ':' .. ARGV[3] .. ':' .. ARGV[4] .. ':' .. ARGV[5])
redis.call('ZADD', KEYS[2], string.format('%.0f', now_ms + tonumber(ARGV[3])), ARGV[1])

local lead = redis.call('HMGET', KEYS[3], 'id', 'nonce', 'term')
local led, oldest = false, nil
local out = {}
local nodes = redis.call('HGETALL', KEYS[1])
for i = 1, #nodes, 2 do
  local id, one = nodes[i], member(nodes[i + 1])
  local lease_end = tonumber(redis.call('ZSCORE', KEYS[2], id) or 0)
  if one and lease_end > now_ms + one.lease then
    lease_end = now_ms + one.lease
    redis.call('ZADD', KEYS[2], string.format('%.0f', lease_end), id)
  end
  if not one or lease_end <= now_ms then
    redis.call('HDEL', KEYS[1], id)
    redis.call('ZREM', KEYS[2], id)
  else
    if not one.leaving then
      led = led or (id == lead[1] and one.nonce == lead[2])
      if not oldest or one.order < oldest.order then oldest = {order = one.order, id = id} end
    end
    local at = #out
    out[at + 1], out[at + 2], out[at + 3] = id, one.order, lease_end - now_ms
    out[at + 4], out[at + 5] = one.leaving and 1 or 0, one.record
  end
end
local leader, term = led and lead[1] or '', tonumber(string.match(lead[3] or '', '^%d+$')) or 0
if not led and oldest and oldest.id == ARGV[1] then
  leader, term = ARGV[1], term + 1
  redis.call('HSET', KEYS[3], 'id', leader, 'nonce', ARGV[2], 'term', term)
end
return {now, 'ok', leader, term, out}
