-- Write the records of a call's runs to the history, in the step that ends the runs. The last KEYS of the call are
--   runs:n, runs, runs:failed, runs:details, runs:ring, rollups of the minute, rollups of the hour
-- and one of its ARGV is a msgpack list:
--   budgets of runs, runs:failed, runs:details; details older than this are dropped, in ms; most subjects of a rollup;
--   times to live of the rollups in ms; entries: {1 if failed, bytes, runs}; details: {entry, bytes};
--   rings: {schedule, entry, number ...}; counts: {subject, {counter = count} ...}
-- `runs:n` has the last id, the bytes of each stream and of the rings, until when each has lost entries, and how many
-- runs were written and dropped. The history never stops the step: runs that cannot be written are counted as dropped.
local RING_BYTES, RING_FIELD, MOST_TRIMMED = 450, 100, 1000

-- Memory of an entry of this length, as measured with jemalloc: entries share nodes of 4 KiB if they can, and the size of
-- a node is rounded up to one of four sizes between two powers of two.
local function memory_of(length)
  local shared = math.max(1, math.floor(4070 / (length + 8)))
  local bytes, step = 40 + shared * (length + 8), 16
  while bytes > step * 8 do step = step * 2 end
  return math.ceil((math.ceil(bytes / step) * step + 70) / shared)
end

local function trim(state, name, key, budget, before, count)
  local trimmed = 0
  while trimmed < MOST_TRIMMED and (state[name] > budget or before > 0) do
    local oldest = redis.call('XRANGE', key, '-', '+', 'COUNT', count)
    if #oldest == 0 then state[name] = 0 return end
    local gone = {}
    for _, entry in ipairs(oldest) do
      local at = tonumber(string.match(entry[1], '^%d+'))
      if state[name] <= budget and at >= before then break end
      gone[#gone + 1] = entry[1]
      state[name] = math.max(0, state[name] - memory_of(#entry[2][2]))
      state[name .. '.gone'] = at
    end
    if #gone == 0 then return end
    redis.call('XDEL', key, unpack(gone))
    trimmed, count = trimmed + #gone, 64
  end
end

local function append(state, name, key, id, bytes, budget)
  local cost = memory_of(#bytes)
  if cost > budget then return false end
  redis.call('XADD', key, id, 'r', bytes)
  state[name] = state[name] + cost
  return true
end

-- A ring has the last 50 runs of a schedule, each as 6 bytes of time, 2 of the entry's id, and 1 of its number in the
-- entry.
local function add_to_rings(state, key, budget, rings, prefixes)
  if #rings == 0 then return end
  local names, written = {}, {}
  for i, ring in ipairs(rings) do names[i] = ring[1] end
  local known = redis.call('HMGET', key, unpack(names))
  for i, ring in ipairs(rings) do
    local refs = {known[i] or ''}
    for k = 2, #ring, 2 do
      local prefix = prefixes[ring[k]]
      if prefix then refs[#refs + 1] = prefix .. string.char(ring[k + 1]) end
    end
    local value = string.sub(table.concat(refs), -RING_BYTES)
    local more = #value - (known[i] and #known[i] or -#names[i] - RING_FIELD)
    if #refs > 1 and (known[i] or state.ring + more <= budget / 4) then
      written[#written + 1], written[#written + 2] = names[i], value
      state.ring = state.ring + more
    end
  end
  if #written > 0 then redis.call('HSET', key, unpack(written)) end
  -- Checking one random ring per call removes rings whose runs are gone, in step with the trimming.
  local name = redis.call('HRANDFIELD', key)
  local refs = name and redis.call('HGET', key, name)
  if refs and #refs >= 9 then
    local high, low, _, number = struct.unpack('>I2I4I2B', string.sub(refs, -9))
    if high * 4294967296 + low <= state[number % 2 == 1 and 'failed.gone' or 'runs.gone'] then
      redis.call('HDEL', key, name)
      state.ring = math.max(0, state.ring - #refs - #name - RING_FIELD)
    end
  end
end

local function add_up(key, ttl, most, counts)
  local subjects = {}
  for i = 1, #counts, 2 do subjects[#subjects + 1] = counts[i] end
  for _, other in ipairs({'os', 'oq', 'ot'}) do subjects[#subjects + 1] = other end
  local known = redis.call('HMGET', key, unpack(subjects))
  local size, written, sums = redis.call('HLEN', key), {}, {}
  for i, subject in ipairs(subjects) do sums[subject] = known[i] and cmsgpack.unpack(known[i]) or nil end
  for i = 1, #counts, 2 do
    local subject = counts[i]
    if not sums[subject] then
      if size >= most then subject = 'o' .. string.sub(subject, 1, 1)
      else size = size + 1 end
    end
    local sum = sums[subject] or {}
    for counter, count in pairs(counts[i + 1]) do sum[counter] = (sum[counter] or 0) + count end
    sums[subject], written[subject] = sum, true
  end
  local flat = {}
  for subject in pairs(written) do flat[#flat + 1], flat[#flat + 2] = subject, cmsgpack.pack(sums[subject]) end
  redis.call('HSET', key, unpack(flat))
  if size <= #subjects then redis.call('PEXPIRE', key, ttl) end
end

local FIELDS = {'runs', 'failed', 'details', 'ring', 'runs.gone', 'failed.gone', 'details.gone', 'written', 'dropped'}

local function write(now, keys, packed)
  local n, streams, details, ring, minute, hour = keys[1], {[0] = keys[2], keys[3]}, keys[4], keys[5], keys[6], keys[7]
  local names = {[0] = 'runs', 'failed'}
  local budgets = {[0] = packed[1], packed[2]}
  local values = redis.call('HMGET', n, 'last', unpack(FIELDS))
  local state = {}
  for i, field in ipairs(FIELDS) do state[field] = tonumber(values[i + 1] or 0) or 0 end
  local ms, seq = string.match(values[1] or '', '^(%d+)-(%d+)$')
  ms, seq = tonumber(ms) or 0, tonumber(seq) or 0
  if now > ms then ms, seq = now, -1 end
  local prefixes, ids, added, appended = {}, {}, {}, {[0] = 0, 0}
  for i, entry in ipairs(packed[8]) do
    seq = seq + 1
    if seq > 65535 then ms, seq = ms + 1, 0 end
    local which = entry[1]
    local id = string.format('%.0f-%.0f', ms, seq)
    if append(state, names[which], streams[which], id, entry[2], budgets[which]) then
      prefixes[i] = struct.pack('>I2I4I2', math.floor(ms / 4294967296), ms % 4294967296, seq)
      ids[i] = id
      appended[which] = appended[which] + 1
      state.written = state.written + entry[3]
    else
      state.dropped = state.dropped + entry[3]
    end
  end
  if #packed[9] > 0 then
    -- The whole stream expires if nothing was added for that long.
    if state.details > 0 and redis.call('EXISTS', details) == 0 then state.details = 0 end
    for _, one in ipairs(packed[9]) do
      if ids[one[1]] then append(state, 'details', details, ids[one[1]], one[2], packed[3]) end
    end
    trim(state, 'details', details, packed[3], now - packed[4], #packed[9] + 1)
    redis.call('PEXPIRE', details, packed[4])
  end
  add_to_rings(state, ring, budgets[0], packed[10], prefixes)
  if appended[0] > 0 then trim(state, 'runs', streams[0], budgets[0] - state.ring, 0, appended[0] + 1) end
  if appended[1] > 0 then trim(state, 'failed', streams[1], budgets[1], 0, appended[1] + 1) end
  if #packed[11] > 0 then
    add_up(minute, packed[6], packed[5], packed[11])
    add_up(hour, packed[7], packed[5], packed[11])
  end
  local flat = {'last', string.format('%.0f-%.0f', ms, seq)}
  for _, field in ipairs(FIELDS) do
    flat[#flat + 1], flat[#flat + 2] = field, string.format('%.0f', state[field])
  end
  redis.call('HSET', n, unpack(flat))
end

local RUNS_KEYS = 7

local function write_runs(now, raw)
  if raw == '' then return end
  local keys, packed = {unpack(KEYS, #KEYS - RUNS_KEYS + 1)}, cmsgpack.unpack(raw)
  if not pcall(write, math.floor(now / 1000), keys, packed) then
    local lost = 0
    for _, entry in ipairs(packed[8]) do lost = lost + entry[3] end
    redis.pcall('HINCRBY', keys[1], 'dropped', lost)
  end
end
