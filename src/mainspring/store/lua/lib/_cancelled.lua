-- Note the ids cancelled last, with the time, because the index forgets them at once.
local function note_cancelled(off, idhs, count, time, most)
  local noted = {}
  for i = math.max(1, count - most + 1), count do noted[#noted + 1] = idhs[i] .. time end
  if #noted == 0 then return end
  redis.call('RPUSH', off, unpack(noted))
  redis.call('LTRIM', off, -most, -1)
end
