-- Commit what finished and begin what is due, for any number of partitions of one server.
--
-- KEYS  a section per partition: own, n, slices; s, f, d, x of each touched slice; s of each known slice
-- ARGV  number of sections, then a section per partition:
--         token, seq, max_due_ms ('' = begin nothing), finished, touched, known
--         per touched slice: name, g, m, header at m, f offset, f bytes, d offset, d bytes
--         per known slice (only when lane tasks begin): name, g, cursor
-- returns {time in us, {status, x bytes per touched slice ...} per section}
--   status: ok | fenced | rolledback | early | stale | more; only ok wrote anything
-- keeps: nothing fires before its time by the server's clock, nothing is written by a former owner, and of a lane
--   no task begins while an earlier one may stand unread.
local now = now_us()
local out = {now}
local k, a = 0, 1

local function check_known(slices, known, max_due)
  local limit = '(' .. (math.floor(max_due / 1000) + 1)
  if redis.call('ZCOUNT', slices, '-inf', limit) ~= known then return false end
  for i = 0, known - 1 do
    local at = a + i * 3
    if not same_incarnation(slices, ARGV[at + 1], tonumber(ARGV[at + 2])) then return false end
    if redis.call('LLEN', KEYS[k + i + 1]) ~= tonumber(ARGV[at + 3]) then return false end
  end
  return true
end

for section = 1, tonumber(ARGV[1]) do
  local own, n, slices = KEYS[k + 1], KEYS[k + 2], KEYS[k + 3]
  local token, seq, max_due = ARGV[a + 1], tonumber(ARGV[a + 2]), tonumber(ARGV[a + 3])
  local finished, touched, known = tonumber(ARGV[a + 4]), tonumber(ARGV[a + 5]), tonumber(ARGV[a + 6])
  k, a = k + 3, a + 6
  local first_key, first_arg = k, a
  local status = fence(own, token, seq)
  local fresh = status == nil
  if fresh and max_due and max_due * 1000 > now then status = 'early' end
  if status == nil or status == 'repeated' then
    for i = 0, touched - 1 do
      local at, key = a + i * 8, k + i * 4
      if not same_incarnation(slices, ARGV[at + 1], tonumber(ARGV[at + 2]))
        or not same_header(redis.call('LINDEX', KEYS[key + 1], ARGV[at + 3]), ARGV[at + 4]) then
        status = 'stale'
        break
      end
    end
  end
  k, a = k + touched * 4, a + touched * 8
  if status == nil and known > 0 and not check_known(slices, known, max_due) then status = 'more' end
  k, a = k + known, a + known * 3
  if status == nil or status == 'repeated' then
    local reply = {'ok'}
    for i = 0, touched - 1 do
      local at, key = first_arg + i * 8, first_key + i * 4
      local f, d = ARGV[at + 6], ARGV[at + 8]
      local x = ''
      if #f > 0 then
        x = redis.call('GETRANGE', KEYS[key + 4], ARGV[at + 5], ARGV[at + 5] + #f - 1)
        if fresh then redis.call('SETRANGE', KEYS[key + 2], ARGV[at + 5], f) end
      end
      if fresh and #d > 0 then redis.call('SETRANGE', KEYS[key + 3], ARGV[at + 7], d) end
      reply[i + 2] = x
    end
    if fresh then
      if finished > 0 then redis.call('HINCRBY', n, 'done', finished) end
      redis.call('HSET', own, 'seq', seq)
    end
    out[section + 1] = reply
  else
    out[section + 1] = {status}
  end
end
return out
