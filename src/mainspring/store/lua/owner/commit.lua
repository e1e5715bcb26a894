-- Commit what has to be written besides a done bit, for one partition: retries, dead letters, dropped repeats, held work
-- that moves into hold slices, answers of receivers, tasks that go to the queues of workers, and the history of all these. The acks
-- of workers that are settled with that go.
--
-- KEYS  fence, n, slices, dead, dead:t, held, ids, holds; s, d of each touched slice; if tasks are handed off: queued, acks,
--       queues, and the stream of each queue; s of each place for retries and moves; s, f, x of each slice that tasks are
--       moved from; a key for each answer; acks; if runs are written, those of lib/_runs.lua
-- ARGV  token, seq, finished, replaced, touched, places, retries, deaths, holds, moves, records, answers, runs (see
--       lib/_runs.lua, '' = none), queues, tasks, acks, then
--         per touched slice: name, g, m (-1 = proven before), header at m, d offset (-1 = all of d), d bytes
--         per queue: name, how many of the tasks
--         per task, queue by queue: its record (see _record.lua)
--         per place: name, score
--         per retry: place (counted from 1), idh, address prefix, entry, address it comes from, touched slice it leaves
--           (counted from 1, 0 = leave no mark), the part of its entry that stays there
--         per death: idh, record, time in ms
--         per hold: lane, idh of the head it waits for and since when ('' = free again)
--         per slice that tasks are moved from: place (counted from 1), address prefix, common prefix of the addresses of
--           its entries, f offset (-1 = all of f), f bytes, count, then count times: index, the part of its entry that
--           stays there ('' = leave no mark), entry for the place
--         per record of a hold: name of its slice, record ('' = forget it)
--         per answer of a receiver: time to live in ms, bytes
--         per ack that is settled: address of its task
-- returns {time in us, status, {position, answer ...}}; status: ok | fenced | rolledback | stale
--   an answer only for some tasks that were to be handed off: '' (another task with its id is in a queue: it stays fired,
--   to be handed off later), or the outcome of a run that had ended before
-- keeps: a task leaves its slice only together with its retry, its dead letter, its place in a hold slice or in a stream. A
--   moved task was not begun, so it may have been cancelled: then it stays cancelled, and is not moved. Its fired bit is set
--   with its done bit: a cancel by its old address must ask the index. If handles may know the old place, a mark leads to
--   the new one: otherwise a task that is cancelled there would look done here. At most one task of an id is in a stream; a
--   task of a lane stays fired, and is not added again when a new owner hands it off again.
local now = now_us()
local fence, n, slices, dead, dead_times, held, ids = unpack(KEYS, 1, 7)
local finished, replaced = tonumber(ARGV[3]), tonumber(ARGV[4])
local touched, places, retries = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local deaths, holds = tonumber(ARGV[8]), tonumber(ARGV[9])
local moves, records, answers = tonumber(ARGV[10]), tonumber(ARGV[11]), tonumber(ARGV[12])
local streams, tasks, acks = tonumber(ARGV[14]), tonumber(ARGV[15]), tonumber(ARGV[16])
local new_fence = ARGV[1] .. ':' .. ARGV[2]
local status = judge(redis.call('GET', fence), new_fence)
if status == 'repeated' and tasks == 0 then return {now, 'ok', {}} end
if status and status ~= 'repeated' then return {now, status, {}} end
local first_touched = 16
for i = 0, touched - 1 do
  local at = first_touched + i * 6
  if not status and not proven(slices, KEYS[9 + i * 2], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3], ARGV[at + 4]) then
    return {now, 'stale', {}}
  end
end
local first_queue, queue_key = first_touched + touched * 6, 8 + touched * 2
local first_task = first_queue + streams * 2
local a = first_task + tasks
local place_key, first_place = queue_key + (streams > 0 and streams + 3 or 0), a

-- Tasks for workers. The work per task is written out: function calls, and tables that are searched for their end, would
-- cost more than the commands.
local sub, byte = string.sub, string.byte
local idhs, of_lane, lane_places, lanes = {}, {}, {}, 0
local in_queues, ended, out, busy = {}, {}, {}, {}
local function answer(i, word) out[#out + 1], out[#out + 2] = i, word end

local function ack_of(i, record)
  local ack = ended[address_of(record)]
  return ack and sub(ack, 1, 16) == idhs[i] and sub(ack, 17)
end

local function is_there(i, record) return in_queues[i] and sub(in_queues[i], 1, 14) == address_of(record) end

-- The done bit of a task, by its address; read only for tasks that have to wait.
local function done_bit(record)
  local name, _, index = place_of(address_of(record))
  for i = 0, touched - 1 do
    if ARGV[first_touched + i * 6 + 1] == name then return KEYS[10 + i * 2], index end
  end
  return nil
end

if tasks > 0 then
  for i = 1, tasks do
    local record = ARGV[first_task + i]
    idhs[i] = sub(record, 20, 35)
    if byte(record, 19) % 4 > 1 then
      lanes = lanes + 1
      of_lane[i], lane_places[lanes] = true, sub(record, 1, 14)
    end
  end
  in_queues = redis.call('HMGET', KEYS[queue_key + 1], unpack(idhs))
  if lanes > 0 then
    for i, ack in ipairs(redis.call('HMGET', KEYS[queue_key + 2], unpack(lane_places))) do ended[lane_places[i]] = ack end
  end
end
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
local incarnation = {}
a = a + places * 2

-- The incarnation of a place. Opened only when needed: a slice that is opened for an entry which is not written would
-- remain empty.
local function opened(place)
  if not incarnation[place] then
    local at = first_place + place * 2
    incarnation[place] = open_slice(slices, ARGV[at - 1], ARGV[at])
  end
  return incarnation[place]
end

-- A list that was deleted by hand takes no mark. This must not stop the commit half way.
local function leave_mark(s, index, mark, address) redis.pcall('LSET', s, index, mark .. address) end

local superseded, retried = {}, retries
for _ = 1, retries do
  local place, idh = tonumber(ARGV[a + 1]), ARGV[a + 2]
  local known = redis.call('HGET', ids, idh)
  if known and known ~= ARGV[a + 5] then
    -- Its id was given to another task while it was in flight: the newer task represents both.
    superseded[idh] = true
    retried, replaced = retried - 1, replaced + 1
  else
    local r = opened(place)
    local length = redis.call('RPUSH', KEYS[place_key + place], ARGV[a + 4])
    local address, left = ARGV[a + 3] .. struct.pack('>I3I4', r, length - 1), tonumber(ARGV[a + 6])
    redis.call('HSET', ids, idh, address)
    if left > 0 then leave_mark(KEYS[7 + left * 2], struct.unpack('>I4', ARGV[a + 5], 11), ARGV[a + 7], address) end
  end
  a = a + 7
end
for _ = 1, deaths do
  redis.call('HSET', dead, ARGV[a + 1], ARGV[a + 2])
  redis.call('ZADD', dead_times, ARGV[a + 3], ARGV[a + 1])
  a = a + 3
end
-- Write held lanes first, then freed ones: a hash that becomes empty in between is gone, and while its slot is moving to
-- another server it cannot be created again here.
local waits = {}
for _ = 1, holds do
  waits[ARGV[a + 1]] = superseded[string.sub(ARGV[a + 2], 1, 16)] and '' or ARGV[a + 2]
  a = a + 2
end
for lane, idh in pairs(waits) do
  if idh ~= '' then redis.call('HSET', held, lane, idh) end
end
for lane, idh in pairs(waits) do
  if idh == '' then redis.call('HDEL', held, lane) end
end
local from_key, spilled = place_key + places, 0
local function is_set(bits, index)
  return math.floor((string.byte(bits, math.floor(index / 8) + 1) or 0) / 2 ^ (7 - index % 8)) % 2 == 1
end

-- In bulk: each call out of the script costs more than the work it does.
local function move(arg, s, x, place, prefix, head, count)
  local gone, idhs, rows, pairs_, from = redis.call('GET', x) or '', {}, {}, {}, {}
  for i = 1, count do idhs[i] = string.sub(ARGV[arg + i * 3], 6, 21) end
  local known = redis.call('HMGET', ids, unpack(idhs))
  for i = 1, count do
    local index = tonumber(ARGV[arg + i * 3 - 2])
    if not is_set(gone, index) then
      if known[i] and known[i] ~= head .. struct.pack('>I4', index) then replaced = replaced + 1
      else
        rows[#rows + 1] = ARGV[arg + i * 3]
        pairs_[#rows * 2 - 1] = idhs[i]
        from[#rows] = arg + i * 3 - 2
      end
    end
  end
  if #rows == 0 then return end
  local where = prefix .. struct.pack('>I3', opened(place))
  local first = redis.call('RPUSH', KEYS[place_key + place], unpack(rows)) - #rows
  for i = 1, #rows do
    pairs_[i * 2] = where .. struct.pack('>I4', first + i - 1)
    local mark = ARGV[from[i] + 1]
    if mark ~= '' then leave_mark(s, ARGV[from[i]], mark, pairs_[i * 2]) end
  end
  redis.call('HSET', ids, unpack(pairs_))
  spilled = spilled + #rows
end

for i = 1, moves do
  local s, f, x = unpack(KEYS, from_key + i * 3 - 2, from_key + i * 3)
  local count = tonumber(ARGV[a + 6])
  move(a + 6, s, x, tonumber(ARGV[a + 1]), ARGV[a + 2], ARGV[a + 3], count)
  if ARGV[a + 4] == '-1' then redis.call('SET', f, ARGV[a + 5])
  else redis.call('SETRANGE', f, ARGV[a + 4], ARGV[a + 5]) end
  a = a + 6 + count * 3
end
for _ = 1, records do
  if ARGV[a + 2] ~= '' then redis.call('HSET', KEYS[8], ARGV[a + 1], ARGV[a + 2])
  else redis.call('HDEL', KEYS[8], ARGV[a + 1]) end
  a = a + 2
end
for i = 1, answers do
  redis.call('SET', KEYS[from_key + moves * 3 + i], ARGV[a + 2], 'PX', ARGV[a + 1])
  a = a + 2
end
if acks > 0 then redis.call('HDEL', KEYS[from_key + moves * 3 + answers + 1], unpack(ARGV, a + 1, a + acks)) end
local added, aside = 0, 0
if tasks > 0 then
  local queued, queues = KEYS[queue_key + 1], KEYS[queue_key + 3]
  local in_queue, p, seen, i = {}, 0, {}, 0
  local call = redis.call
  for q = 1, streams do
    local name, stream = ARGV[first_queue + q * 2 - 1], KEYS[queue_key + 3 + q]
    if call('EXISTS', stream) == 0 then
      call('XGROUP', 'CREATE', stream, 'w', '0', 'MKSTREAM')
      call('SADD', queues, name)
    end
    for _ = 1, tonumber(ARGV[first_queue + q * 2]) do
      i = i + 1
      local record, idh = ARGV[first_task + i], idhs[i]
      local ack = of_lane[i] and ack_of(i, record)
      if ack then
        answer(i, ack)
      elseif in_queues[i] or seen[idh] then
        if not is_there(i, record) then
          answer(i, '')
          if not of_lane[i] then busy[#busy + 1] = record end
        end
      else
        seen[idh] = true
        in_queue[p + 1], in_queue[p + 2] = idh, sub(record, 1, 14) .. call('XADD', stream, '*', 'e', record) .. ' ' .. name
        p = p + 2
        if of_lane[i] then aside = aside + 1 else added = added + 1 end
      end
    end
  end
  spread(in_queue, p, 'HSET', queued)
end
if added > 0 then redis.call('HINCRBY', n, 'queued', added) end
if aside > 0 then redis.call('HINCRBY', n, 'aside', aside) end
if spilled > 0 then redis.call('HINCRBY', n, 'spilled', spilled) end
if finished > 0 then redis.call('HINCRBY', n, 'done', finished) end
if replaced > 0 then redis.call('HINCRBY', n, 'replaced', replaced) end
if retried > 0 then redis.call('HINCRBY', n, 'retried', retried) end
if deaths > 0 then redis.call('HINCRBY', n, 'dead', deaths) end
for i = 0, touched - 1 do
  local at = first_touched + i * 6
  if ARGV[at + 5] == '-1' then redis.call('SET', KEYS[10 + i * 2], ARGV[at + 6])
  elseif ARGV[at + 6] ~= '' then redis.call('SETRANGE', KEYS[10 + i * 2], ARGV[at + 5], ARGV[at + 6]) end
end
for _, record in ipairs(busy) do
  local d, index = done_bit(record)
  if d then redis.call('SETBIT', d, index, 0) end
end
redis.call('SET', fence, new_fence)
write_runs(now, ARGV[13])
return {now, 'ok', out}
