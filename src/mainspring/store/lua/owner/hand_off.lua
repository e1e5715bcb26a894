-- Hand tasks of one partition off to its queues: the commit of tasks that workers run.
--
-- KEYS  fence, n, slices, queued, acks, queues; the stream of each queue; s, d of each touched slice
-- ARGV  token, seq, finished, touched, queues, tasks, then
--         per touched slice: name, g, m (-1 = proven before), header at m, d offset (-1 = all of d), d bytes
--         per queue: name, how many of the tasks
--         per task, queue by queue: its record (see _record.lua)
-- returns {time in us, status, {position, answer ...}}; status: ok | fenced | rolledback | stale
--   an answer only for some tasks: '' (another task with its id is in a queue: it stays fired, to be handed off later),
--   or the outcome of a run that had ended before
-- keeps: a task without a lane leaves its slice only together with its place in a stream; at most one task of an id is in
--   a stream; a task of a lane stays fired, and is not added again when a new owner hands it off again.
local now = now_us()
local fence, n, slices, queued, acks, queues = unpack(KEYS, 1, 6)
local finished, touched, streams, tasks = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local new_fence = ARGV[1] .. ':' .. ARGV[2]
local status = judge(redis.call('GET', fence), new_fence)
if status and status ~= 'repeated' then return {now, status, {}} end
local first_touch_key = 6 + streams
for i = 0, touched - 1 do
  local at = 6 + i * 6
  if not status and not proven(slices, KEYS[first_touch_key + i * 2 + 1], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3], ARGV[at + 4]) then
    return {now, 'stale', {}}
  end
end
local first_queue = 6 + touched * 6
local first_task = first_queue + streams * 2

-- The work per task is written out here: function calls, and tables that are searched for their end, would cost more than
-- the commands.
local sub, byte = string.sub, string.byte
local idhs, of_lane, lane_places, lanes = {}, {}, {}, 0
for i = 1, tasks do
  local record = ARGV[first_task + i]
  idhs[i] = sub(record, 20, 35)
  if byte(record, 19) % 4 > 1 then
    lanes = lanes + 1
    of_lane[i], lane_places[lanes] = true, sub(record, 1, 14)
  end
end
local known = redis.call('HMGET', queued, unpack(idhs))
local ended = {}
if lanes > 0 then
  for i, ack in ipairs(redis.call('HMGET', acks, unpack(lane_places))) do ended[lane_places[i]] = ack end
end

-- The done bit of a task, by its address; read only for tasks that have to wait.
local function done_bit(record)
  local name, _, index = place_of(address_of(record))
  for i = 0, touched - 1 do
    if ARGV[6 + i * 6 + 1] == name then return KEYS[first_touch_key + i * 2 + 2], index end
  end
  return nil
end

local out, busy = {}, {}
local function answer(i, word) out[#out + 1], out[#out + 2] = i, word end

local function ack_of(i, record)
  local ack = ended[address_of(record)]
  return ack and string.sub(ack, 1, 16) == idhs[i] and string.sub(ack, 17)
end

local function is_there(i, record) return known[i] and string.sub(known[i], 1, 14) == address_of(record) end

if status == 'repeated' then
  for i = 1, tasks do
    local record = ARGV[first_task + i]
    if of_lane[i] then
      if not is_there(i, record) then answer(i, ack_of(i, record) or '') end
    else
      local d, index = done_bit(record)
      if d and redis.call('GETBIT', d, index) == 0 then answer(i, '') end
    end
  end
  return {now, 'ok', out}
end

local places, p, seen, added, i = {}, 0, {}, 0, 0
local call = redis.call
for q = 1, streams do
  local name, stream = ARGV[first_queue + q * 2 - 1], KEYS[6 + q]
  if redis.call('EXISTS', stream) == 0 then
    redis.call('XGROUP', 'CREATE', stream, 'w', '0', 'MKSTREAM')
    redis.call('SADD', queues, name)
  end
  for _ = 1, tonumber(ARGV[first_queue + q * 2]) do
    i = i + 1
    local record, idh = ARGV[first_task + i], idhs[i]
    local ack = of_lane[i] and ack_of(i, record)
    if ack then
      answer(i, ack)
    elseif known[i] or seen[idh] then
      if not is_there(i, record) then
        answer(i, '')
        if not of_lane[i] then busy[#busy + 1] = record end
      end
    else
      seen[idh] = true
      places[p + 1], places[p + 2] = idh, sub(record, 1, 14) .. call('XADD', stream, '*', 'e', record) .. ' ' .. name
      p = p + 2
      if not of_lane[i] then added = added + 1 end
    end
  end
end
spread(places, p, 'HSET', queued)
if added > 0 then redis.call('HINCRBY', n, 'queued', added) end
if p / 2 > added then redis.call('HINCRBY', n, 'aside', p / 2 - added) end
if finished > 0 then redis.call('HINCRBY', n, 'done', finished) end
for t = 0, touched - 1 do
  local at, d = 6 + t * 6, KEYS[first_touch_key + t * 2 + 2]
  if ARGV[at + 6] ~= '' then
    if ARGV[at + 5] == '-1' then redis.call('SET', d, ARGV[at + 6])
    else redis.call('SETRANGE', d, ARGV[at + 5], ARGV[at + 6]) end
  end
end
for _, record in ipairs(busy) do
  local d, index = done_bit(record)
  if d then redis.call('SETBIT', d, index, 0) end
end
redis.call('SET', fence, new_fence)
return {now, 'ok', out}
