-- leave: a process stops claiming (drain, exit). Nobody waits for it any longer.
-- KEYS[1] rq:x:pool:<pool> HASH
-- ARGV    prefix, pool, process
-- Returns 1
-- needs: select

call('HDEL', K_WAITING, ARGV[3])
announce(server_ms(), spill_after())
return 1
