-- Give a node some of a limit's permits: of its rate, and of its slots for tasks that run at the same time.
--
-- KEYS  the limit
-- ARGV  node, how many of its permits are in use, how many more it wants, lease in ms,
--       us between two permits (0 = no rate), how many at once after a pause, slots (0 = no bound), permits of the rate
--       that the node already holds: with them it needs slots only
-- returns {time in us, granted (of a rate, permits), most slots it may use from now on, us until it should ask again}
-- keeps: over any span no more permits than the rate and the burst allow, and never more than `slots` in use or granted
--   by all live nodes together. The rate is stored as the time at which all permits given so far are used up at an even
--   pace. A node that was silent for a lease loses its slots. Nodes that want slots get equal shares.
--   The number of slots is stored too, to explain why a task waits (`running_slots`).
local now = now_us()
local key, node = KEYS[1], ARGV[1]
local used, want, lease_us = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]) * 1000
local interval, burst, slots = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local have = tonumber(ARGV[8])
local granted, most, wait, lasts_us = want, used + want, 0, lease_us
local fair = slots
local gone = {}

if slots > 0 then
  local others, wanting = 0, 1
  local fields = redis.call('HGETALL', key)
  for i = 1, #fields, 2 do
    if string.sub(fields[i], 1, 2) == 'n:' and fields[i] ~= 'n:' .. node then
      local their, wanted, ends = string.match(fields[i + 1], '^(%d+):(%d+):(%d+)$')
      if not ends or tonumber(ends) <= now or tonumber(ends) > now + lease_us * 10 then
        gone[#gone + 1] = fields[i]
      else
        others = others + tonumber(their)
        if tonumber(their) + tonumber(wanted) > 0 then wanting = wanting + 1 end
      end
    end
  end
  if wanting > 1 then fair = math.ceil(slots / wanting) end
  granted = math.max(0, math.min(granted, slots - others - used, fair - used))
  -- Slots become free when deliveries end, which the server does not see: ask again soon.
  if granted < want then wait = 50000 end
end

local begins = granted
if interval > 0 then
  local used_up = math.max(tonumber(redis.call('HGET', key, 'tat') or 0), now)
  -- Further ahead than the rate allows: the clock was set back, or the rate has changed.
  local too_far = used_up > now + burst * interval
  if too_far then used_up = now + burst * interval end
  local free = math.max(0, math.floor((now + burst * interval - used_up) / interval + 0.000001))
  granted = math.min(free, math.max(0, granted - have))
  begins = math.min(begins, have + granted)
  if granted > 0 or too_far then
    used_up = used_up + granted * interval
    redis.call('HSET', key, 'tat', string.format('%.0f', used_up))
  end
  if granted < want - have then wait = math.max(wait, math.ceil(used_up + interval - burst * interval - now)) end
  lasts_us = math.max(lasts_us, used_up - now)
end

if slots > 0 then
  most = math.min(used + begins, fair)
  if used + want > 0 then
    redis.call('HSET', key, 'n:' .. node,
      string.format('%d:%d:%.0f', used + begins, want - begins, now + lease_us), 'slots', slots)
  else
    gone[#gone + 1] = 'n:' .. node
  end
  -- Last, because a hash that becomes empty cannot be created again while its slot is moving to another server.
  if #gone > 0 then redis.call('HDEL', key, unpack(gone, 1, math.min(#gone, 1000))) end
end
if redis.call('EXISTS', key) == 1 then
  redis.call('PEXPIRE', key, string.format('%.0f', math.ceil(lasts_us / 1000) + 1000))
end
return {now, granted, most, math.ceil(wait)}
