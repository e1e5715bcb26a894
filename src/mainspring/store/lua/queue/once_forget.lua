-- Forget that a handler was begun for a task.
--
-- KEYS  its record
-- ARGV  the mark that the run has left there
-- returns 1 when it was forgotten, 0 when there is another record by now
-- keeps: a run that failed takes nothing back of another one, which may have begun, or be done, since.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
