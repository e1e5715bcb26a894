-- Check where entries of the index lead.
--
-- KEYS  slices, ids; s of each slice they name
-- ARGV  how many slices, how many ids, then per slice: name, its end in ms
--       per id: idh, address as it was read, which of the slices (from 1)
-- returns {position, fault ...} of entries that do not lead to their task; see _verify_id.lua
local slices, ids = tonumber(ARGV[1]), tonumber(ARGV[2])
local now_ms = math.floor(now_us() / 1000)
local first = 2 + slices * 2
local scores, idhs, out = {}, {}, {}
for i = 1, slices do
  local score = redis.call('ZSCORE', KEYS[1], ARGV[1 + i * 2])
  scores[i] = score and tonumber(score)
end
for i = 1, ids do idhs[i] = ARGV[first + i * 3 - 2] end
local known = redis.call('HMGET', KEYS[2], unpack(idhs))
for i = 1, ids do
  local address, place = ARGV[first + i * 3 - 1], tonumber(ARGV[first + i * 3])
  if known[i] == address then
    local end_ms = tonumber(ARGV[2 + place * 2])
    local fault = fault_of(idhs[i], address, KEYS[2 + place], scores[place], end_ms, now_ms)
    if fault then out[#out + 1], out[#out + 2] = i, fault end
  end
end
return out
