{{- /* The common parts of all pods: security, environment and mounts. */ -}}

{{- define "tidemill.podSecurity" -}}
{{- $ours := index (fromYaml (include "tidemill.ports" .)) "ours" -}}
runAsNonRoot: true
{{- range $id, $number := .Values.podSecurity }}
{{- if $number }}
{{ $id }}: {{ $number | int64 }}
{{- end }}
{{- end }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
sysctls:
  - name: net.ipv4.ip_local_port_range
    value: {{ printf "%d %d" (index $ours 0 | int64) (index $ours 1 | int64) | quote }}
{{- end -}}

{{- define "tidemill.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- define "tidemill.place" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .topologySpreadConstraints }}
topologySpreadConstraints:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- /* Several pods of a component are on several nodes, unless the values say where. */ -}}
{{- define "tidemill.spread" -}}
{{- if not .place.topologySpreadConstraints }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "tidemill.selector" . | nindent 8 }}
{{- end }}
{{- end -}}

{{- define "tidemill.podBasics" -}}
automountServiceAccountToken: false
{{- with .Values.serviceAccountName }}
serviceAccountName: {{ . }}
{{- end }}
{{- with include "tidemill.pullSecrets" . | trim }}{{ . | nindent 0 }}{{- end }}
securityContext:
  {{- include "tidemill.podSecurity" . | nindent 2 }}
{{- end -}}

{{- define "tidemill.pullSecrets" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- /* The root is read-only: programs write only below HOME and to shared memory. */ -}}
{{- define "tidemill.env" -}}
- name: HOME
  value: /tmp
- name: POD_IP
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
{{- end -}}

{{- /* The database of pods that answer clients. */ -}}
{{- define "tidemill.databaseEnv" -}}
{{- with .Values.database.existingSecret }}
- name: TIDEMILL_DATABASE
  valueFrom:
    secretKeyRef:
      name: {{ . }}
      key: {{ $.Values.database.key }}
{{- end }}
{{- end -}}

{{- /* The environment of pods that download: that of all, then their own. */ -}}
{{- define "tidemill.downloadEnv" -}}
{{- with concat .root.Values.env (.own | default list) }}
{{- toYaml . }}
{{- end }}
{{- end -}}

{{- define "tidemill.mounts" -}}
- name: tmp
  mountPath: /tmp
- name: shm
  mountPath: /dev/shm
{{- end -}}

{{- define "tidemill.volumes" -}}
- name: tmp
  emptyDir: {}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ .Values.sharedMemory }}
{{- end -}}

{{- /* The files and folders that frontend and workers share, at the same paths. The server also checks that it can
use the store's folder. */ -}}
{{- define "tidemill.sharedMounts" -}}
{{- if .Values.modelVolume }}
- name: models
  mountPath: /models
  readOnly: true
{{- end }}
{{- if .Values.clusterTls.existingSecret }}
- name: cluster-tls
  mountPath: /etc/tidemill/cluster-tls
  readOnly: true
{{- end }}
{{- if .Values.store.secret.existingSecret }}
- name: store-secret
  mountPath: /etc/tidemill/store
  readOnly: true
{{- end }}
{{- if .Values.store.folder.volume }}
- name: pages
  mountPath: /var/lib/tidemill/pages
{{- end }}
{{- end -}}

{{- define "tidemill.sharedVolumes" -}}
{{- with .Values.modelVolume }}
- name: models
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.clusterTls.existingSecret }}
- name: cluster-tls
  secret:
    secretName: {{ . }}
    defaultMode: 0440
{{- end }}
{{- with .Values.store.secret }}
{{- if .existingSecret }}
- name: store-secret
  secret:
    secretName: {{ .existingSecret }}
    defaultMode: 0440
    items:
      - key: {{ .key }}
        path: secret
{{- end }}
{{- end }}
{{- with .Values.store.folder.volume }}
- name: pages
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
