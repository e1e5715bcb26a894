-- Commit finished tasks and begin due ones, for any number of partitions of one server.
--
-- Every value handed to a script and every call out of it costs more than the work itself. So all sections share one
-- MGET and one MSET, counts are packed into one string, and values that a section does not need are not sent.
--
-- KEYS  fence of each section; x, then f, of each small slice that begins; then per section, in this order:
--       f, x of each large slice that begins; d of each slice that commits; n if something finished; slices if there
--       are proofs or known slices; s of each slice to be proven; s of each known slice; if occurrences of schedules
--       begin: next, ids, n, slices, s of each place for the following ones, x of each slice with a skipped one
-- ARGV  sections, small slices in all, latest due time in ms ('' = nothing begins), then per section:
--         the fence it expects, the fence it leaves behind ("<token>:<seq>" both)
--         counts: small, large, commits, proofs, known, finished, occurrences, packed; '' means one small slice
--         per small slice: all of f
--         per large slice: f offset, f bytes
--         per commit: d offset (-1 = the bytes are all of d), d bytes
--         per proof: name, g, m, header at m (only rows that no earlier call has proven)
--         per known slice (only when lane tasks begin): name, g, cursor (-1 = not a slice, whatever its list holds); and
--           before them the section's latest due
--         if there are occurrences: places, slices with skipped ones; per place: name, score, address prefix; then per
--           occurrence the values listed in _occurrence.lua
-- returns {time in us, {status, x of each small, x range of each large ..., and if there are occurrences, which chains
--   were left alone} per section}
--   status: ok | fenced | rolledback | early | stale | more; only ok wrote anything
-- keeps: nothing fires before its time by the server's clock, nothing is written by a former owner, and no task of a lane
--   begins while an earlier one may be unread. The following occurrence of a schedule is put in the step in which one
--   begins: not at commit, or a slow delivery would lose planned times. Finished tasks are counted last, once the fences
--   are checked: a call that failed before is repeated, and would count them again.
local now = now_us()
local out = {now}
local sections, all_small, latest = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local early = latest and latest * 1000 > now
local MOST_VALUES = 4000 -- Lua can unpack only some thousand; even, for the pairs of MSET

local function values_of(count)
  if count <= MOST_VALUES then return redis.call('MGET', unpack(KEYS, 1, count)) end
  local all = {}
  for first = 1, count, MOST_VALUES do
    local some = redis.call('MGET', unpack(KEYS, first, math.min(first + MOST_VALUES - 1, count)))
    for i = 1, #some do all[first + i - 1] = some[i] end
  end
  return all
end

local values = values_of(sections + all_small)
local writes, w = {}, 0
local counters, counts = {}, {}
local k, a, small_at = sections + all_small * 2, 3, sections

local function check_known(slices, known, max_due, key, arg)
  local limit = '(' .. (math.floor(max_due / 1000) + 1)
  if redis.call('ZCOUNT', slices, '-inf', limit) ~= known then return false end
  for i = 0, known - 1 do
    local at = arg + i * 3
    if not same_incarnation(slices, ARGV[at + 1], tonumber(ARGV[at + 2])) then return false end
    local cursor = tonumber(ARGV[at + 3])
    if cursor >= 0 and redis.call('LLEN', KEYS[key + i + 1]) ~= cursor then return false end
  end
  return true
end

local function check_proofs(slices, proofs, key, arg)
  for i = 0, proofs - 1 do
    local at = arg + i * 4
    if not same_incarnation(slices, ARGV[at + 1], tonumber(ARGV[at + 2]))
      or not same_header(redis.call('LINDEX', KEYS[key + i + 1], ARGV[at + 3]), ARGV[at + 4]) then
      return false
    end
  end
  return true
end

for section = 1, sections do
  local have, fresh = values[section], true
  local status
  if have ~= ARGV[a + 1] then
    status = judge(have, ARGV[a + 2])
    fresh = false
  elseif early then
    status = 'early'
  end
  local new_fence = ARGV[a + 2]
  local small, large, commits, proofs, known, finished, occurrences = 1, 0, 0, 0, 0, 0, 0
  local common = ARGV[a + 3] == ''
  if not common then
    small, large, commits, proofs, known, finished, occurrences = struct.unpack('>I2I2I2I2I2I4I2', ARGV[a + 3])
  end
  a = a + 3
  local small_arg = a
  a = a + small
  local reply, left_alone = {'ok'}, nil
  if not common then
    local large_key, large_arg = k, a
    local commit_key, commit_arg = k + large * 2, a + large * 2
    k, a = commit_key + commits, commit_arg + commits * 2
    local n, slices
    if finished > 0 then k, n = k + 1, KEYS[k + 1] end
    if proofs + known > 0 then k, slices = k + 1, KEYS[k + 1] end
    local proof_key, proof_arg = k, a
    local known_key, known_arg = k + proofs, a + proofs * 4
    k, a = known_key + known, known_arg + (known > 0 and known * 3 + 1 or 0)
    local occurrence_key, occurrence_arg, skips = k, a, 0
    if occurrences > 0 then
      skips = tonumber(ARGV[a + 2])
      k, a = k + 4 + ARGV[a + 1] + skips, a + 2 + ARGV[a + 1] * 3 + occurrences * OCCURRENCE_ARGS
    end
    if (status == nil or status == 'repeated') and proofs > 0 and not check_proofs(slices, proofs, proof_key, proof_arg) then
      status = 'stale'
    end
    if status == nil and known > 0 and not check_known(slices, known, tonumber(ARGV[known_arg + 1]), known_key, known_arg + 1) then
      status = 'more'
    end
    if status == 'repeated' and occurrences > 0 then
      left_alone = not_moved(occurrences, occurrence_key, occurrence_arg)
    elseif status == nil and occurrences > 0 then
      left_alone = put_next(occurrences, occurrence_key, occurrence_arg)
      -- Skipped occurrences count as cancelled: their bits were set just now.
      if skips > 0 then
        for i = small_at + 1, small_at + small do values[i] = redis.call('GET', KEYS[i]) end
      end
    end
    if status == nil or status == 'repeated' then
      for i = 0, large - 1 do
        local at, key = large_arg + i * 2, large_key + i * 2
        reply[small + i + 2] = redis.call('GETRANGE', KEYS[key + 2], ARGV[at + 1], ARGV[at + 1] + #ARGV[at + 2] - 1)
        if fresh then redis.call('SETRANGE', KEYS[key + 1], ARGV[at + 1], ARGV[at + 2]) end
      end
    end
    if status == nil then
      for i = 0, commits - 1 do
        local at = commit_arg + i * 2
        if ARGV[at + 1] == '-1' then
          writes[w + 1], writes[w + 2], w = KEYS[commit_key + i + 1], ARGV[at + 2], w + 2
        else
          redis.call('SETRANGE', KEYS[commit_key + i + 1], ARGV[at + 1], ARGV[at + 2])
        end
      end
      if finished > 0 then counters[#counters + 1], counts[#counts + 1] = n, finished end
    end
  end
  if status == nil or status == 'repeated' then
    for i = 1, small do
      reply[i + 1] = values[small_at + i] or ''
      if fresh then
        writes[w + 1], writes[w + 2], w = KEYS[small_at + i + all_small], ARGV[small_arg + i], w + 2
      end
    end
    reply[small + large + 2] = left_alone
    if fresh then writes[w + 1], writes[w + 2], w = KEYS[section], new_fence, w + 2 end
    out[section + 1] = reply
  else
    out[section + 1] = {status}
  end
  small_at = small_at + small
end
for first = 1, w, MOST_VALUES do
  redis.call('MSET', unpack(writes, first, math.min(first + MOST_VALUES - 1, w)))
end
for i = 1, #counters do redis.call('HINCRBY', counters[i], 'done', counts[i]) end
return out
